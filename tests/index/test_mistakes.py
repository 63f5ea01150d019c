"""Mistakes that newcomers make end in a sentence that says what to do."""

import pytest
import torch
from torch import nn

import unde
from unde import UndeError

DATA = torch.randn(20, 4), torch.randint(2, (20,))
TASK = unde.tasks.Classification()


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return unde.Index.build(
        nn.Linear(4, 2), TASK, DATA, tmp_path_factory.mktemp("i") / "index", method="tracin"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((DATA, "runs/i"), r"the task is a tuple: .* in Index.build\(model, task, train_data, path\)"),
        ((unde.tasks.Classification, DATA, "runs/i"), r"pass an object, such as Classification\(\)"),
        ((TASK, DATA), "path is missing"),
        ((TASK, (DATA[0].double(), DATA[1]), "runs/i"), r"convert the data .* such as x.float\(\)"),
    ],
)
def test_builds(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UndeError, match=said):
        unde.Index.build(nn.Linear(4, 2), *arguments)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("manifest.json"))


def test_methods_and_ranks(index):
    with pytest.raises(
        UndeError, match=r"method is the class TRAK: pass an object, such as unde.methods.TRAK\(\)"
    ):
        index.score(DATA, method=unde.methods.TRAK)
    with pytest.raises(UndeError, match=r"top\(5.0\): expected a whole number"):
        index.score((DATA[0] + 1, DATA[1])).top(5.0)


def test_a_method_that_does_not_fit_is_refused_before_a_model_is_loaded(index):
    from typer.testing import CliRunner

    from unde.cli.app import app

    said = CliRunner().invoke(
        app, ["attribute", "no_such_module:make", "--index", str(index.folder), "--method", "das"]
    )
    assert "but the index holds 'loss'" in " ".join(str(said.exception or said.output).split())
