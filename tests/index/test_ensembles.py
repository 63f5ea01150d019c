"""Several sets of weights in one index: an ensemble of models that were trained independently."""

from functools import partial
from unittest import mock

import pytest
import torch

import toy
from unde import Index, Setup, UndeError
from unde.index.builder import BuildSettings
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.projection import Projection, checkpoint_seed
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


def project(features: torch.Tensor, spec: str, seed: int) -> torch.Tensor:
    named = {name: p.shape for name, p in toy.net().named_parameters()}
    parts = features.split([shape.numel() for shape in named.values()], 1)
    return torch.cat(
        [
            Projection(spec, name, shape, seed)(part)
            for (name, shape), part in zip(named.items(), parts, strict=True)
        ],
        1,
    )


@pytest.mark.parametrize("spec", ["kron(2)", "sjlt(4)", "dense(4)"])
def test_each_member_has_random_projections_of_its_own(tmp_path, spec):
    options = {"method": TracIn(projection=spec), "checkpoints": toy.states(0, 1, 2), "seed": 5}
    index = toy.build(tmp_path / "i", **options)
    stored, asked = toy.stored(index).rows(torch.arange(22)), index.features(QUERIES).features
    gradients = [
        [toy.gradients(toy.net(c), Classification(), d) for d in (toy.data(22), QUERIES)] for c in range(3)
    ]
    for c, (train, query) in enumerate(gradients):
        seed = checkpoint_seed(5, c)
        torch.testing.assert_close(stored[c], project(train, spec, seed), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(asked[c], project(query, spec, seed), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(stored[1], project(gradients[1][0], spec, 5), atol=1e-2)


def shared(folder, **options):
    """An index as releases before 0.3 wrote them: one projection for all checkpoints."""
    with mock.patch("unde.index.index.BuildSettings", partial(BuildSettings, per_checkpoint=False)):
        return toy.build(folder, **options)


def test_indexes_with_one_projection_for_all_members_stay_valid(tmp_path):
    options = {"method": EKFAC(projection="kron(2)"), "checkpoints": toy.states(0, 1), "ids": list(range(22))}
    old = shared(tmp_path / "i", **options)
    assert "per_checkpoint" not in old.manifest.as_dict()["resolved"]
    want = project(toy.gradients(toy.net(1), Classification(), QUERIES), "kron(2)", 0)
    again = toy.build(tmp_path / "i", **options)  # resumes
    assert again.manifest.id == old.manifest.id
    torch.testing.assert_close(again.features(QUERIES).features[1], want, rtol=1e-4, atol=1e-6)
    again.add_fisher("sampled", progress=False)  # its kernel is applied to these features
    assert not toy.stored(again).fisher("sampled").manifest.resolved.per_checkpoint
    again.append(toy.data(3, seed=9), ids=[30, 31, 32], progress=False)
    torch.testing.assert_close(again.features(QUERIES).features[1], want, rtol=1e-4, atol=1e-6)


def test_members_with_other_projections_are_not_merged(tmp_path):
    options = {"method": TracIn(projection="kron(2)"), "checkpoints": toy.states(0, 1)}
    shared(tmp_path / "a", **options)
    toy.build(tmp_path / "b", train_data=toy.data(5, seed=9), **options)
    with pytest.raises(UndeError, match="whether checkpoints share their random projections"):
        Index.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")


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
