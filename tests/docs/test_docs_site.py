"""The site is built without a warning; `make docs` does the same and writes the pages."""

import io
import sys

import pytest
from blocks import DOCS

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """All pages read, references resolved; nothing is written."""
    from sphinx.application import Sphinx

    path, modules, said = list(sys.path), set(sys.modules), io.StringIO()
    out = tmp_path_factory.mktemp("site")
    app = Sphinx(
        DOCS, DOCS, out / "html", out / "doctrees", "dummy", status=None, warning=said, freshenv=True
    )
    app.build()
    yield app, said.getvalue()
    sys.path[:] = path
    for name in {"docstrings", "commands"} & (set(sys.modules) - modules):  # those of docs/_site
        del sys.modules[name]


def test_site_has_no_warning(site):
    assert site[1] == ""


def test_public_names_are_in_the_reference(site):
    import unde

    shown = set(site[0].env.domains["py"].objects)
    names = {f"unde.{name}" for name in unde.__all__} - {"unde.__version__", "unde.evaluate", "unde.methods"}
    names |= {f"unde.evaluate.{name}" for name in unde.evaluate.__all__}
    names |= {f"unde.tasks.{name}" for name in unde.tasks.__all__ if name != "Task"}
    names |= {f"unde.methods.{m.__name__}" for m in unde.methods.METHODS.values()}
    assert names - shown - {"unde.tasks"} == set()


def test_every_command_is_in_the_reference(site):
    from shell import COMMANDS

    shown = site[0].env.get_doctree("cli").astext()
    for name, command in COMMANDS.items():
        assert f"unde {name}" in shown
        wanted = [o for p in command.params for o in p.opts if p.param_type_name == "option"]
        assert [option for option in wanted if option not in shown] == []
