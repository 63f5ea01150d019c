"""Scores straight from features are those of the contributions that an index streams."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from unde import Index, methods
from unde.tasks import Classification
from unde.weights.contributions import Contributions

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
        options = {"method": method, "groups": "layer", "progress": False} | several
        index = Index.build(models[0], Classification(), data(70), folder, **options)
        found[name] = index.score(data(9, seed=1))
    return found


@pytest.mark.parametrize("name", list(METHODS))
def test_scores_are_those_of_contributions(made, name):
    scores = made[name]
    small = replace(scores, memory=2 * scores.queries.nbytes)
    g = torch.Generator().manual_seed(2)
    c = scores.by_group()  # (Q, N, M)
    which, weights = torch.tensor([1, 4, 5]), [torch.rand(c.shape[2], generator=g) for _ in range(2)]
    for source in (scores, small):
        spans = Contributions(source).scores("test", which, weights, 0)
        parts = [torch.cat(part) for part in zip(*(of_span for _, of_span in spans))]
        for part, w in zip(parts, weights):
            torch.testing.assert_close(part, c[which] @ w, rtol=1e-4, atol=1e-5)
