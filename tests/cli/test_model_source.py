"""What an index remembers of how it was built, and what is not run because of it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from commands import invoke, run
from safetensors.torch import save_file

from refusals import refused
from unde import UndeError
from unde.setup import Recipe
from unde.store.files import settings_checksum


def test_commands_remember_what_an_index_was_built_from(built):
    said = ("attribute", built, "--index", "idx", "--format", "json")
    unsaid = ("attribute", "--index", "idx", "--format", "json")
    assert json.loads(run(*unsaid)) == json.loads(run(*said))
    run("report", "--index", "idx", "--first", 1, "--out", "page.html")
    assert "row-" in Path("page.html").read_text()
    assert f"using {built}, as remembered by idx" in " ".join(invoke(*unsaid).split())


def test_checkpoints_are_remembered(project, tmp_path, monkeypatch):
    """Scores over two checkpoints are those of indexes of one each, added up in equal shares."""
    model = Recipe(f"{project}:make").make().model
    (tmp_path / "all").mkdir()
    for name, factor in (("a", 1.0), ("b", 0.5)):
        state = {k: factor * v for k, v in model.state_dict().items()}
        (tmp_path / name).mkdir()
        for folder in ("all", name):
            save_file(state, tmp_path / folder / f"{name}.safetensors")
    common = ("build", f"{project}:make", "--method", "tracin", "--projection", "none")
    scores = {}
    for name in ("all", "a", "b"):
        run(*common, "--checkpoints", name, "--out", f"idx-{name}")
        rows = json.loads(run("attribute", "--index", f"idx-{name}", "--top", 60, "--format", "json"))
        scores[name] = {(r["query"], r["index"]): r["score"] for r in rows}
    for key, value in scores["all"].items():
        assert value == pytest.approx((scores["a"][key] + scores["b"][key]) / 2, rel=1e-4, abs=1e-5)


def test_a_remembered_name_is_found_as_a_typed_one_is(built, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("sys.path", [p for p in sys.path if Path(p).resolve() != tmp_path.resolve()])
    for name in [m for m in sys.modules if m.startswith("project_")]:
        monkeypatch.delitem(sys.modules, name)
    refused(r"no module 'project_.* here", run, "attribute", "--index", tmp_path / "idx")


def write_source(target):
    settings = {"target": target}
    content = settings | {"checksum": settings_checksum(settings)}
    Path("idx/source.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("os:abort", "the index was built by somebody else"),
        ("pytest:main", "the index was built by somebody else"),
        ("evil", "it is no MODULE:FUNCTION"),
        ("a b:c", "it is no MODULE:FUNCTION"),
        ("../evil:make", "it is no MODULE:FUNCTION"),
        ("idx.evil:make", "idx.evil lies in the index itself"),
    ],
)
def test_names_in_a_foreign_index_are_not_run(built, target, why):
    Path("idx/evil.py").write_text("raise SystemExit('run')")
    write_source(target)
    refused(f"which is not run without being asked for .*{why}", run, "learn", "--index", "idx")


def test_modules_inside_the_index_are_not_run_from_there(built, monkeypatch):
    Path("idx/evil.py").write_text("raise SystemExit('run')")
    write_source("evil:make")
    monkeypatch.chdir("idx")
    refused("evil lies in the index itself", run, "learn", "--index", ".")


def test_what_somebody_else_has_built_with_is_not_run(built, tmp_path, monkeypatch):
    """Even if a module of that name is here: it must be typed once."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    refused(r"somebody else, or elsewhere.*: give MODULE:FUNCTION", run, "attribute", "--index", "idx")
    run("attribute", built, "--index", "idx")
    with pytest.raises(UndeError, match="somebody else"):  # asking is not building
        run("attribute", "--index", "idx")
    run("build", built, "--out", "idx", "--projection", "none")
    run("attribute", "--index", "idx")


def test_a_copy_is_not_known(built):
    shutil.copytree("idx", "copy")
    refused("somebody else, or elsewhere", run, "attribute", "--index", "copy")
    run("attribute", built, "--index", "copy")


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"a": ', None])
def test_a_damaged_list_knows_no_index(built, tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    run("build", built, "--out", "idx", "--projection", "none")
    path = tmp_path / "home" / "unde" / "indexes.json"
    assert json.loads(path.read_text()) == {str(Path("idx").resolve()): built}
    path.unlink() if content is None else path.write_text(content)
    refused("somebody else", run, "attribute", "--index", "idx")
    run("build", built, "--out", "idx", "--projection", "none")
    run("attribute", "--index", "idx")
