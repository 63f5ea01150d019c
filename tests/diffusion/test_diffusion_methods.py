"""D-TRAK and DAS as their equations are written, and DAS as the exact leave-one-out change of ridge regression."""

import pytest
import torch
from denoisers import ddpm, gradient, images, index_of, toy
from torch import nn

from refusals import refused
from unde import Groups, Task, learn_weights
from unde.diffusion import sample
from unde.methods import DAS, DTRAK, JourneyTRAK
from unde.tasks import Diffusion

N, Q = 9, 4


def gradients(model, task, x, name):
    values = (task.measure(model, row[None], name=name).sum() for row in x)
    return torch.stack([gradient(model, value) for value in values]).double()


def kernel(phi, damping=0.1):
    gram = phi.T @ phi
    return torch.linalg.inv(gram + damping * gram.diagonal().mean() * torch.eye(len(gram)))


@pytest.fixture(params=["epsilon", "v_prediction"])
def setting(tmp_path, request):
    model, task = toy(), Diffusion(ddpm(prediction_type=request.param), timesteps=4)
    x, queries = images(N), images(Q, seed=5)

    def scores(method):
        index = index_of(model, task, x, tmp_path / "i", method=method, groups="tensor")
        return index, index.score(queries)

    return model, task, x, queries, scores


def close(got, want, tolerance=2e-3):
    assert (got.double() - want).norm() <= tolerance * want.norm()


def test_d_trak(setting):
    model, task, x, queries, scores = setting
    phi, q = (gradients(model, task, rows, "square") for rows in (x, queries))
    close(scores(DTRAK(projection="none", damping=0.1))[1].total(), q @ kernel(phi) @ phi.T)


def das_parts(model, task, x, queries):
    """C_j (Q, N, M) by parameter, and r / (1 − h)."""
    phi, q = (gradients(model, task, rows, "mean") for rows in (x, queries))
    k = kernel(phi)
    transformed, start, parts = phi @ k, 0, []
    for p in model.parameters():
        c = slice(start, start + p.numel())
        start += p.numel()
        parts.append(q[:, c] @ transformed[:, c].T)
    h = (transformed * phi).sum(1)
    r = task.measure(model, x, name="residual").double().detach()
    return torch.stack(parts, 2), r / (1 - h)


def test_das_with_weights_before_the_square(setting):
    model, task, x, queries, scores = setting
    parts, factor = das_parts(model, task, x, queries)
    index, got = scores(DAS(projection="none", damping=0.1))
    close(got.total(), (parts.sum(2) * factor) ** 2)
    close(got.by_group(), parts)
    w = torch.rand(parts.shape[2], generator=torch.Generator().manual_seed(0))
    close(got.total(w), (parts @ w.double() * factor) ** 2)
    assert torch.equal(got.top(3, w).indices, got.total(w).topk(3).indices)
    assert (got.total() >= 0).all()
    own = index.self_influence()
    alone, same = das_parts(model, task, x, x)
    close(own, torch.diagonal((alone.sum(2) * same) ** 2))


def test_das_with_weights_after_the_square(setting):
    model, task, x, queries, scores = setting
    parts, factor = das_parts(model, task, x, queries)
    squares = (parts * factor[:, None]) ** 2
    index, got = scores(DAS(projection="none", damping=0.1, weigh="after"))
    close(got.by_group(), squares)
    close(got.total(), squares.sum(2))
    w = torch.rand(parts.shape[2], generator=torch.Generator().manual_seed(0))
    close(got.total(w), squares @ w.double())
    assert torch.equal(got.top(3, w).indices, got.total(w).topk(3).indices)
    alone, same = das_parts(model, task, x, x)
    close(index.self_influence(), torch.diagonal(((alone * same[:, None]) ** 2).sum(2)))


@pytest.mark.parametrize("weigh", ["before", "after"])
def test_weights_are_learned(setting, weigh):
    *_, scores = setting
    _, got = scores(DAS(weigh=weigh))
    w = learn_weights(got, k=2)
    assert (w.values >= 0).all()
    assert got.total(w.values).isfinite().all()


class Ridge(Task):
    """The prediction of a linear model as measurement, its residual as r."""

    def measure(self, model, batch, *, name="loss", ids=None):
        x, y = batch
        predicted = model(x)[:, 0]
        return {"mean": predicted, "residual": y - predicted, "loss": (y - predicted) ** 2}[name]


def test_das_is_the_squared_leave_one_out_change_of_ridge_regression(tmp_path):
    g = torch.Generator().manual_seed(0)
    x, truth = torch.randn(20, 5, generator=g), torch.randn(5, generator=g)
    y = x @ truth + 0.3 * torch.randn(20, generator=g)
    queries, lam = torch.randn(6, 5, generator=g), 0.7

    def fit(keep):
        a, b = x[keep].double(), y[keep].double()
        return torch.linalg.solve(a.T @ a + lam * torch.eye(5), a.T @ b)

    everything = list(range(20))
    theta = fit(everything)
    model = nn.Linear(5, 1, bias=False)
    model.weight.data = theta.float()[None]
    method = DAS(damping=lam, relative=False, projection="none")
    index = index_of(model, Ridge(), (x, y), tmp_path / "i", method=method, groups=Groups.by_tensor(model))
    got = index.score((queries, torch.zeros(6))).total()
    for n in everything:
        without = fit([i for i in everything if i != n])
        change = queries.double() @ (theta - without)
        torch.testing.assert_close(got[:, n].double(), change**2, rtol=1e-3, atol=1e-8)


def test_a_leverage_of_one_stays_finite(tmp_path):
    """Nearly no damping and as many parameters as examples: every example is its own prediction."""
    x = torch.eye(3)
    model = nn.Linear(3, 1, bias=False)
    method = DAS(damping=1e-9, relative=False, projection="none")
    index = index_of(model, Ridge(), (x, torch.ones(3)), tmp_path / "i", method=method)
    assert index.score((x, torch.ones(3))).total().isfinite().all()


def test_options():
    refused("weigh 'both'", DAS, weigh="both")
    assert DAS(weigh="after").linear
    assert not DAS().linear


METHODS = {
    "d-trak": DTRAK(projection="kron(3)"),
    "das": DAS(projection="kron(3)"),
    "journey": JourneyTRAK(projection="kron(3)"),
    "journey-per-step": JourneyTRAK(projection="kron(3)", training="per-step", inference_steps=3),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_appended_to_and_removed_from_as_built_at_once(tmp_path, method):
    model, task, x = toy(), Diffusion(ddpm(), timesteps=3), images(14)
    options = {"method": method, "memory": "50MB"}
    index = index_of(model, task, x[:8], tmp_path / "i", **options)
    index.append(x[8:], progress=False)
    index.remove(indices=[2, 9])
    left = torch.tensor([i for i in range(14) if i not in (2, 9)])
    whole = index_of(model, task, x[left], tmp_path / "w", **options)
    queries = images(3, seed=5)
    if "journey" in method.name:
        samples = sample(model, ddpm(clip_sample=False), (2, 4, 4), [1, 2], steps=3, progress=False)
        queries = samples.queries(journey=True)
    got, want = index.score(queries).total(), whole.score(queries).total()
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert index.verify()
