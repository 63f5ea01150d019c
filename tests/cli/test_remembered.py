"""What an index remembers of how it was built, and what is not run because of it."""

import json
import sys
from pathlib import Path

import pytest
from commands import invoke, run

from unde import UndeError


def test_commands_remember_what_an_index_was_built_from(built):
    said = ("attribute", built, "--index", "idx", "--format", "json")
    unsaid = ("attribute", "--index", "idx", "--format", "json")
    assert json.loads(run(*unsaid)) == json.loads(run(*said))
    run("report", "--index", "idx", "--first", 1, "--no-trust", "--out", "page.html")
    assert "row-" in Path("page.html").read_text()
    assert f"using {built}, as remembered by idx" in " ".join(invoke(*unsaid).split())


def test_a_remembered_name_is_found_as_a_typed_one_is(built, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("sys.path", [p for p in sys.path if Path(p).resolve() != tmp_path.resolve()])
    for name in [m for m in sys.modules if m.startswith("project_")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UndeError, match=r"no module 'project_.* here"):
        run("attribute", "--index", tmp_path / "idx")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("os:abort", "os is a part of Python"),
        ("os.path:x", "os is a part of Python"),
        ("evil", "it is no MODULE:FUNCTION"),
        ("a b:c", "it is no MODULE:FUNCTION"),
        ("../evil:make", "it is no MODULE:FUNCTION"),
        ("idx.evil:make", "idx.evil lies in the index itself"),
    ],
)
def test_names_in_a_foreign_index_are_not_run(built, target, why):
    Path("idx/evil.py").write_text("raise SystemExit('run')")
    Path("idx/source.json").write_text(json.dumps({"target": target}))
    with pytest.raises(UndeError, match=f"which is not run without being asked for .*{why}"):
        run("learn", "--index", "idx")


def test_modules_inside_the_index_are_not_run_from_there(built, monkeypatch):
    Path("idx/evil.py").write_text("raise SystemExit('run')")
    Path("idx/source.json").write_text(json.dumps({"target": "evil:make"}))
    monkeypatch.chdir("idx")
    with pytest.raises(UndeError, match="evil lies in the index itself"):
        run("learn", "--index", ".")
