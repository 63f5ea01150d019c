"""Several sets of weights in one index: an ensemble of models that were trained independently."""

from functools import partial

import pytest
import torch

import toy
from unde import Setup, UndeError
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.tasks import Classification

QUERIES = toy.data(5, seed=3)


@pytest.mark.parametrize("method", [TRAK, LoGRA, EKFAC, partial(EKFAC, fisher="true"), TracIn])
def test_scores_of_an_ensemble_are_the_mean_of_its_members(tmp_path, method):
    members = [toy.net(seed) for seed in range(3)]
    single = [
        toy.build(tmp_path / f"{i}", model=m, method=method(projection="none")).score(QUERIES).total()
        for i, m in enumerate(members)
    ]
    states, shares = [m.state_dict() for m in members], [0.2, 0.3, 0.5]
    options = {"method": method(projection="none"), "checkpoints": states}
    mean = toy.build(tmp_path / "mean", **options).score(QUERIES).total()
    torch.testing.assert_close(mean, torch.stack(single).mean(0), rtol=1e-4, atol=1e-5)
    weighted = toy.build(tmp_path / "weighted", **options, checkpoint_weights=shares).score(QUERIES).total()
    want = sum(share * scores for share, scores in zip(shares, single))
    torch.testing.assert_close(weighted, want, rtol=1e-4, atol=1e-5)


def test_a_setup_brings_checkpoints(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from unde.cli import app
    from unde.cli.options import ModelOptions
    from unde.cli.project import Project

    (tmp_path / "ensemble_setup.py").write_text(
        "import toy, unde\n"
        "def make():\n"
        "    states = [toy.net(seed).state_dict() for seed in range(2)]\n"
        "    return unde.Setup(toy.net(), unde.tasks.Classification(), toy.data(22), checkpoints=states,\n"
        "                      checkpoint_weights=[0.25, 0.75])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    project = Project(ModelOptions("ensemble_setup:make"))
    assert len(project.checkpoints) == 2 and project.shares == [0.25, 0.75]
    out = tmp_path / "idx"
    command = ["build", "ensemble_setup:make", "--out", str(out), "--method", "trak", "--projection", "none"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    index = project.index(out)
    assert index.manifest.checkpoint_weights == [0.25, 0.75] and index.manifest.terms == 2
    options = {"checkpoints": toy.states(0, 1), "checkpoint_weights": [0.25, 0.75]}
    want = toy.build(tmp_path / "j", method=TRAK(projection="none"), **options)
    torch.testing.assert_close(index.score(QUERIES).total(), want.score(QUERIES).total())


def test_weights_without_checkpoints():
    with pytest.raises(UndeError, match=r"2 checkpoint_weights for 0 checkpoints"):
        Setup(toy.net(), Classification(), toy.data(3), checkpoint_weights=[0.5, 0.5])
