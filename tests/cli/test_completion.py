"""What the shell is offered: commands, methods and folders of indexes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from unde import cli
from unde.cli.options import indexes


def offered(line):
    env = {"_UNDE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return CliRunner().invoke(cli.app, [], prog_name="unde", env=env).stdout.split()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    for name in ("runs/one", "runs/two", "runs/deep/er/three", "other/.hidden", "runs/no"):
        (tmp_path / name).mkdir(parents=True)
        if not name.endswith("no"):
            (tmp_path / name / "manifest.json").touch()
    monkeypatch.chdir(tmp_path)


def test_methods():
    assert offered("unde build --method tr") == ["tracin", "trak", "tracin-cosine"]
    assert offered("unde attribute --index x --method ek") == ["ekfac"]
    assert offered("unde plan --store-dtype f") == ["float32", "float16"]
    assert offered("unde build --store-dtype i") == ["int8"]


def test_commands():
    assert offered("unde att") == ["attribute"]


def test_folders_that_hold_an_index(folders):
    expected = ["runs/one", "runs/two"]
    assert offered("unde attribute --index r") == expected
    assert offered("unde verify runs/t") == ["runs/two"]
    assert offered("unde finish ") == expected
    assert indexes("runs/deep/") == ["runs/deep/er/three"]
    assert indexes(str(Path.cwd() / "runs" / "o")) == [str(Path.cwd() / "runs" / "one")]
    assert indexes("nowhere/") == [] and indexes("other/") == [] and indexes("other/.h") == ["other/.hidden"]


def test_it_can_be_installed():
    text = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "200"}).stdout
    assert "--install-completion" in text
