"""Scores, sums and rows straight from features are those of the contributions that an index hands out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from unde import Index, learn_weights, methods
from unde.groups import Groups
from unde.tasks import Classification
from unde.weights import sampled
from unde.weights.contributions import Contributions
from unde.weights.from_features import FromFeatures
from unde.weights.problem import Problem

METHODS = {
    "tracin": methods.TracIn(projection="kron(3)"),
    "trak": methods.TRAK(projection="kron(3)"),
    "logra": methods.LoGRA(projection="kron(3)"),
}


def data(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g), torch.randint(4, (n,), generator=g)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Scores of 9 queries, by method and groups."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
        models = [nn.Sequential(*layers, nn.Linear(6, 4)) for _ in range(2)]
    found = {}
    for name, method in METHODS.items():
        folder = tmp_path_factory.mktemp(name) / "i"
        several = {}
        if name == "tracin":
            several = {"checkpoints": [m.state_dict() for m in models], "checkpoint_weights": [0.5, 2.0]}
        index = Index.build(
            models[0],
            Classification(),
            data(70),
            folder,
            method=method,
            groups="layer",
            progress=False,
            **several,
        )
        found[name] = index.score(data(9, seed=1))
    return found


@pytest.mark.parametrize("name", list(METHODS))
def test_scores_sums_and_rows_are_those_of_contributions(made, name):
    scores = made[name]
    features = FromFeatures.of(scores)
    assert features is not None
    c = scores.by_group()  # (Q, N, M)
    g = torch.Generator().manual_seed(2)
    which, w = torch.tensor([1, 4, 5]), torch.rand(c.shape[2], generator=g)
    pull = torch.randn(3, c.shape[1], generator=g)
    picks = torch.randint(c.shape[1], (3, 11), generator=g)
    torch.testing.assert_close(features.scores(which, w), c[which] @ w, rtol=1e-4, atol=1e-5)
    sums, rows = features.pulled(which, pull, picks)
    torch.testing.assert_close(sums, torch.einsum("qn,qnj->qj", pull, c[which]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows, c[which[:, None], picks], rtol=1e-4, atol=1e-5)


def test_kernels_that_mix_groups_go_by_contributions(made):
    by_tensor = made["logra"].regroup({n: [n] for n in made["logra"].groups})
    assert FromFeatures.of(by_tensor) is not None
    units = made["logra"].train.units
    split = made["logra"].regroup(unit_by_unit(units))
    assert FromFeatures.of(split) is None
    assert FromFeatures.of(made["tracin"].regroup(unit_by_unit(units))) is not None


def unit_by_unit(units):
    return Groups({u: (u,) for u in units})


def test_a_budget_too_small_for_contributions_gives_the_same_weights(made):
    scores = made["tracin"]
    small = replace(scores, memory=2 * scores.queries.nbytes)
    assert Contributions(scores)._features is None
    assert Contributions(small)._features is not None
    whole, streamed = (learn_weights(s, k=5, weight_decay=0.1) for s in (scores, small))
    torch.testing.assert_close(streamed.values, whole.values, rtol=1e-3, atol=1e-4)


def test_a_climb_by_features_is_the_one_by_contributions(made, monkeypatch):
    monkeypatch.setattr(sampled, "_SHARE", 5)
    kept, by_features = Contributions(made["tracin"]), Contributions(made["tracin"])
    by_features._kept, by_features._features = None, FromFeatures.of(made["tracin"])
    found = [sampled.climb([Problem(d, torch.arange(9), 5, "top-k")], [0.1])[0] for d in (kept, by_features)]
    assert len(found[0].curve) > 1
    np.testing.assert_allclose(found[1].weights, found[0].weights, rtol=1e-3, atol=1e-4)
