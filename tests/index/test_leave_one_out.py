"""L2 logistic regression: scores against exact leave-one-out."""

import re

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from unde import Index
from unde.data import Rows
from unde.index.choice import weight_decay
from unde.methods import EKFAC, TRAK, TracIn
from unde.tasks import Classification

N, CLASSES, FEATURES = 120, 3, 8
LEFT_OUT = range(0, N, 4)


def with_ones(x):
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def fit(x, y, lam, decay_bias=True, theta=None):
    """Newton's method on the sum of losses + λ/2 ‖θ‖²."""
    x = with_ones(x)
    theta = torch.zeros(CLASSES, x.shape[1], dtype=x.dtype) if theta is None else theta
    decay = lam * torch.ones_like(theta)
    decay[:, -1] *= 1.0 if decay_bias else 1e-6
    for _ in range(30):
        p = (x @ theta.T).softmax(1)
        gradient = (p - one_hot(y, CLASSES)).T @ x + decay * theta
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        hessian = torch.einsum("nab,ni,nj->aibj", middle, x, x).reshape(theta.numel(), -1)
        step = torch.linalg.solve(hessian + decay.flatten().diag(), gradient.flatten()).view_as(theta)
        theta = theta - step
        if step.norm() < 1e-10:
            break
    return theta


def world(l2, decay_bias=True):
    """Training data, queries, the fitted model, and by how much a query gets worse without an example."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (N + 30,), generator=g)
    middle = torch.randn(CLASSES, FEATURES, generator=g, dtype=torch.float64)
    x = 0.7 * middle[y] + torch.randn(N + 30, FEATURES, generator=g, dtype=torch.float64)
    train, queries = (x[:N], y[:N]), (x[N:], y[N:])
    theta = fit(*train, N * l2, decay_bias)

    def losses(theta):
        return cross_entropy(with_ones(queries[0]) @ theta.T, queries[1], reduction="none")

    others = [tuple(torch.cat([t[:i], t[i + 1 :]]) for t in train) for i in LEFT_OUT]
    truth = torch.stack([losses(fit(*o, N * l2, decay_bias, theta)) - losses(theta) for o in others], 1)
    model = nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        model.weight.copy_(theta[:, :-1])
        model.bias.copy_(theta[:, -1])
    return (train[0].float(), train[1]), (queries[0].float(), queries[1]), model, truth


def agreement(scores, truth):
    found = scores.total()[:, list(LEFT_OUT)]
    return sum(spearmanr(a, b).statistic for a, b in zip(found, truth)) / len(truth)


@pytest.mark.parametrize("decay_bias", [True, False])
@pytest.mark.parametrize("l2", [0.01, 0.001])
def test_scores_are_leave_one_out(tmp_path, l2, decay_bias):
    train, queries, model, truth = world(l2, decay_bias)

    def built(name, **method):
        return Index.build(model, Classification(), train, tmp_path / name, progress=False, **method)

    index = built("defaults")
    assert index.method.projection == "none" and index.fishers == ("empirical", "true")
    assert index.method.damping == pytest.approx(N * l2, rel=0.05) and not index.method.relative
    assert agreement(index.score(queries), truth) >= 0.97  # 0.90 is the promise
    exact = TRAK(fisher="true", damping=N * l2, relative=False, projection="none")
    assert agreement(index.score(queries, exact), truth) >= 0.97
    assert agreement(built("exact", method=exact).score(queries), truth) >= 0.97
    assert agreement(index.score(queries, TracIn()), truth) < 0.9


def test_ekfac_has_the_same_defaults(tmp_path):
    """It is an approximation, but one with the right λ."""
    train, queries, model, truth = world(0.01)
    index = Index.build(model, Classification(), train, tmp_path, method="ekfac", progress=False)
    assert index.method.damping == pytest.approx(0.01, rel=0.05) and index.method.fisher == "true"
    assert agreement(index.score(queries), truth) > agreement(index.score(queries, TracIn()), truth) + 0.05
    assert index.method_for(TRAK()).damping == pytest.approx(N * 0.01, rel=0.05)
    assert agreement(index.score(queries, TRAK()), truth) >= 0.97
    assert index.method_for(EKFAC(damping=0.1)).relative


def test_what_was_settled_is_printed(tmp_path, capsys):
    train, _, model, _ = world(0.01)
    Index.build(model, Classification(), train, tmp_path)
    err = capsys.readouterr().err
    said = r"chosen: method trak \(a small model\); projection none: .*; fisher true and λ = 1.2, that of the L2 reg"
    assert re.search(said, err)


def test_models_that_are_not_at_a_minimum_say_nothing_about_it(tmp_path):
    train, _, model, _ = world(0.01)
    task, rows, names = Classification(), Rows(train), [name for name, _ in model.named_parameters()]
    before = [p.clone() for p in model.parameters()]
    assert weight_decay(model, task, rows, names) == pytest.approx(1.2, rel=1e-3)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters()))
    torch.manual_seed(0)
    other = nn.Linear(FEATURES, CLASSES)
    assert weight_decay(other, task, rows, names) is None
    index = Index.build(other, task, train, tmp_path, progress=False)
    assert index.method == TRAK(projection="none", damping=0.1, fisher="empirical")
    large = nn.Sequential(nn.Linear(FEATURES, 700), nn.Linear(700, CLASSES))
    assert weight_decay(large, task, rows, [name for name, _ in large.named_parameters()]) is None
