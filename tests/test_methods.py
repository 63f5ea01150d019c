"""Whole methods, from model to scores, against closed forms and against the paper's equations written out."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import toy
import unde
from unde import Groups, UndeError, methods
from unde.methods import TRAK, TracIn
from unde.projection import Projection
from unde.tasks import Classification, Task

N, D, Q, RIDGE = 40, 6, 5, 1.7


class Prediction(Task):
    """Squared error, but what is attributed is the prediction itself."""

    def loss(self, model, batch):
        return 0.5 * (model(batch[0]).squeeze(1) - batch[1]).square()

    def measure(self, model, batch, *, name="loss", ids=None):
        return model(batch[0]).squeeze(1)


def regression():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g, dtype=torch.float64) * torch.tensor([3.0, 1, 1, 0.5, 0.2, 1])
    y = x @ torch.randn(D, generator=g, dtype=torch.float64) + torch.randn(
        N, generator=g, dtype=torch.float64
    )
    return x, y, torch.randn(Q, D, generator=g, dtype=torch.float64)


def ridge(x, y, weight=None):
    """argmin Σ_n ½ weight_n (xᵀθ − y)² + ½ λ‖θ‖²"""
    weight = torch.ones(len(x), dtype=x.dtype) if weight is None else weight
    penalty = RIDGE * torch.eye(D, dtype=x.dtype)
    return torch.linalg.solve(x.T @ (weight[:, None] * x) + penalty, x.T @ (weight * y))


@pytest.fixture
def fitted(tmp_path):
    """A ridge regression as a model, and its index."""
    x, y, queries = regression()
    model = nn.Linear(D, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(ridge(x, y).float()[None])
    data = x.float(), y.float()
    method = TRAK(damping=RIDGE, relative=False, projection="none")
    index = toy.build(tmp_path / "i", model=model, task=Prediction(), train_data=data, method=method)
    return index, (queries.float(), torch.zeros(Q)), x, y, queries


def test_trak_on_predictions_is_the_hat_matrix(fitted):
    """x_qᵀ (XᵀX + λI)⁻¹ x_n"""
    index, asked, x, _, queries = fitted
    want = queries @ torch.linalg.inv(x.T @ x + RIDGE * torch.eye(D, dtype=x.dtype)) @ x.T
    torch.testing.assert_close(index.score(asked).total().double(), want, rtol=1e-5, atol=1e-6)


def test_times_residuals_it_is_influence(fitted):
    """d f(q) / d weight_n of the refitted ridge regression, by differences of two refits."""
    index, asked, x, y, queries = fitted
    residual = y - x @ ridge(x, y)
    influence = index.score(asked).total().double() * residual
    step, want = 1e-5, torch.empty(Q, N, dtype=torch.float64)
    for n in range(N):
        up, down = torch.ones(2, N, dtype=torch.float64)
        up[n], down[n] = 1 + step, 1 - step
        want[:, n] = queries @ (ridge(x, y, up) - ridge(x, y, down)) / (2 * step)
    torch.testing.assert_close(influence, want, rtol=1e-5, atol=1e-6)


def test_with_leverages_it_is_leaving_one_out(fitted):
    """f(q) − f₋ₙ(q) = τ(q, n) r_n / (1 − τ(n, n)), with the regression refitted without each example."""
    index, asked, x, y, queries = fitted
    theta = ridge(x, y)
    leverage = index.self_influence().double()
    predicted = index.score(asked).total().double() * (y - x @ theta) / (1 - leverage)
    for n in range(N):
        rest = torch.arange(N) != n
        want = queries @ (theta - ridge(x[rest], y[rest]))
        torch.testing.assert_close(predicted[:, n], want, rtol=2e-5, atol=1e-6)


def explicit(model, projection=None, seed=0):
    """(queries, training examples): Pᵀ∇L by one backward pass each, in float64."""
    model = copy.deepcopy(model).double()
    out = []
    for x, y in (toy.data(4, seed=3), toy.data(22)):
        gradient = toy.gradients(model, Classification(), (x.double(), y))
        if projection:
            shapes = [(n, tuple(p.shape)) for n, p in model.named_parameters()]
            parts = gradient.split([p.numel() for p in model.parameters()], 1)
            made = [Projection(projection, *s, seed).to(torch.device("cpu"), torch.float64) for s in shapes]
            gradient = torch.cat([p(g.view(-1, *s)) for p, (_, s), g in zip(made, shapes, parts)], 1)
        out.append(gradient)
    return out


def trak(phi_q, phi, lam):
    """Equation 2."""
    return phi_q @ torch.linalg.inv(phi.T @ phi + lam * torch.eye(phi.shape[1], dtype=phi.dtype)) @ phi.T


def scored(tmp_path, method, name="i", **options):
    index = toy.build(tmp_path / name, method=method, **options)
    return index.score(toy.data(4, seed=3))


def same(got, want, tolerance=1e-5):
    """To a part of the largest score: small ones come of cancellation."""
    assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("projection", ["none", "kron(2)", "sjlt(7)", "dense(9)"])
def test_tracin_is_equation_1(tmp_path, projection):
    phi_q, phi = explicit(toy.net(), projection)
    same(scored(tmp_path, TracIn(projection=projection)).total(), phi_q @ phi.T)


@pytest.mark.parametrize("projection", ["none", "kron(2)", "sjlt(7)", "dense(9)"])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_trak_is_equation_2(tmp_path, projection, form):
    phi_q, phi = explicit(toy.net(), projection)
    absolute = TRAK(damping=0.05, relative=False, projection=projection, form=form)
    same(scored(tmp_path, absolute).total(), trak(phi_q, phi, 0.05))
    relative = TRAK(damping=0.3, projection=projection, form=form)
    lam = 0.3 * float((phi.T @ phi).diagonal().mean())
    same(scored(tmp_path, relative, "j").total(), trak(phi_q, phi, lam))


def test_weights_are_on_the_query_side(tmp_path):
    """Equation 4: g(q)ᵀ Diag(w) K g(n)."""
    phi_q, phi = explicit(toy.net())
    weight = torch.tensor([0.3] * 36 + [1.7] * 21, dtype=torch.float64)
    scores = scored(tmp_path, TRAK(damping=0.05, relative=False, projection="none"))
    same(scores.total([0.3, 1.7]), trak(phi_q * weight, phi, 0.05))
    parts = [trak(phi_q * at, phi, 0.05) for at in (torch.arange(57) < 36, torch.arange(57) >= 36)]
    same(scores.by_group(), torch.stack(parts, 2))


def test_a_positive_score_lowers_the_loss(tmp_path):
    """TracIn is what a small step on n does to the loss of q."""
    scores, step = scored(tmp_path, TracIn(projection="none")).total(), 1e-6
    model = toy.net().double()
    (x, y), (tx, ty) = toy.data(4, seed=3), toy.data(22)
    gradients = toy.gradients(model, Classification(), (tx.double(), ty))
    before = Classification().loss(model, (x.double(), y))
    start = nn.utils.parameters_to_vector(model.parameters())
    for n in range(22):
        nn.utils.vector_to_parameters(start - step * gradients[n], model.parameters())
        drop = (before - Classification().loss(model, (x.double(), y))) / step
        torch.testing.assert_close(scores[:, n].double(), drop, rtol=1e-3, atol=1e-5)


class Squared(Task):
    def loss(self, model, batch):
        return 0.5 * (model(batch[0]).squeeze(1) - batch[1]).square()


def test_tracin_of_a_bilinear_model(tmp_path):
    """f = uᵀV x with error e: ⟨∇_u, ∇_u⟩ = e e′ (Vx)·(Vx′) and ⟨∇_V, ∇_V⟩ = e e′ ‖u‖² x·x′."""
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 1, bias=False))
    x, y, q, z = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((22, 5), (22,), (4, 5), (4,)))
    v, u = model[0].weight.detach().double(), model[1].weight.detach().double()[0]
    e, e_q = x @ v.T @ u - y, q @ v.T @ u - z
    of_v = torch.outer(e_q, e) * (u @ u) * (q @ x.T)
    of_u = torch.outer(e_q, e) * ((q @ v.T) @ (x @ v.T).T)

    data = x.float(), y.float()
    index = toy.build(tmp_path / "i", model=model, task=Squared(), train_data=data)
    scores = index.score((q.float(), z.float()))
    assert scores.groups == ["0", "1"]
    same(scores.by_group(), torch.stack([of_v, of_u], 2))
    same(scores.total(), of_v + of_u)
    same(scores.total([0.5, 3.0]), 0.5 * of_v + 3 * of_u)

    own = (e**2) * ((u @ u) * (x * x).sum(1) + (x @ v.T).square().sum(1))
    own_q = (e_q**2) * ((u @ u) * (q * q).sum(1) + (q @ v.T).square().sum(1))
    same(index.self_influence(), own)
    cosine = index.score((q.float(), z.float()), method="tracin-cosine")
    same(cosine.total(), (of_v + of_u) / torch.outer(own_q, own).sqrt())


ETAS = [0.5, 0.25, 0.1]


@pytest.mark.parametrize("method", [TracIn(projection="none"), TRAK(projection="none", damping=0.5)])
def test_checkpoints_add_up(tmp_path, method):
    """Σ_c η_c of the scores of single checkpoints, each under its own kernel; equal shares by default."""
    states = [toy.net(c).state_dict() for c in (1, 2, 3)]
    alone = [scored(tmp_path, method, f"s{c}", model=toy.net(c)) for c in (1, 2, 3)]
    single = torch.stack([scores.total().double() for scores in alone])
    parts = torch.stack([scores.by_group().double() for scores in alone])
    weighted = scored(tmp_path, method, "w", checkpoints=states, checkpoint_weights=ETAS)
    same(weighted.total(), torch.einsum("c,cqn->qn", torch.tensor(ETAS).double(), single), 2e-6)
    same(weighted.by_group(), torch.einsum("c,cqnm->qnm", torch.tensor(ETAS).double(), parts), 2e-6)
    same(scored(tmp_path, method, "m", checkpoints=states).total(), single.mean(0), 2e-6)


def test_cosine_over_checkpoints(tmp_path):
    """The cosine of the features of all checkpoints side by side, each scaled by √η."""
    states = [toy.net(c).state_dict() for c in (1, 2, 3)]
    scores = scored(tmp_path, TracIn(cosine=True), checkpoints=states, checkpoint_weights=ETAS)
    sides = zip(ETAS, [explicit(toy.net(c)) for c in (1, 2, 3)])
    q, n = (torch.cat(parts, 1) for parts in zip(*[(eta**0.5 * q, eta**0.5 * n) for eta, (q, n) in sides]))
    same(scores.total(), torch.nn.functional.cosine_similarity(q.unsqueeze(1), n, dim=2), 3e-6)
    one = scored(tmp_path, TracIn(), "a", checkpoints=[toy.net(4).state_dict()])
    assert torch.equal(one.total(), scored(tmp_path, TracIn(), "b", model=toy.net(4)).total())


@pytest.mark.parametrize("built", ["tracin", "trak"])
@pytest.mark.parametrize("asked", ["tracin", "tracin-cosine", "trak", TRAK(damping=3.0), TRAK(form="dual")])
def test_any_kernel_on_one_index(tmp_path, built, asked):
    """As from an index built for it; a method that names no projection takes that of the index."""
    q = toy.data(4, seed=3)
    one = toy.build(tmp_path / "i", method=replace(methods.parse(built), projection="kron(2)"))
    own = toy.build(tmp_path / "j", method=replace(methods.parse(asked), projection="kron(2)"))
    got = one.score(q, method=asked)
    assert torch.equal(got.total(), own.score(q).total())
    assert got.provenance["method"] == own.method.describe()


@pytest.mark.parametrize(
    "groups", ["tensor", "layer", "consecutive(3)", {"weights": "weight", "biases": "bias"}], ids=str
)
def test_regrouping_is_rebuilding(tmp_path, groups):
    q, method = toy.data(4, seed=3), TRAK(projection="kron(2)")
    rebuilt = toy.build(tmp_path / "i", method=method, groups=groups).score(q)
    index = toy.build(tmp_path / "j", method=method, groups="layer")
    regrouped = index.score(q).regroup(Groups.parse(groups, toy.net()))
    assert regrouped.groups == rebuilt.groups
    assert torch.equal(regrouped.by_group(), rebuilt.by_group())
    w = torch.rand(len(rebuilt.groups))
    assert torch.equal(regrouped.total(w), rebuilt.total(w))
    layers = index.score(q)
    if groups == "tensor":
        parts = regrouped.by_group()
        want = torch.stack([parts[..., :2].sum(2), parts[..., 2:].sum(2)], 2)
        torch.testing.assert_close(layers.by_group(), want, rtol=1e-5, atol=1e-8)


def test_a_method_of_another_projection_is_refused(tmp_path):
    index = toy.build(tmp_path / "i", method=TRAK(projection="kron(2)"))
    said = r"under none, but the index holds 'loss' under kron\(2\): build another"
    with pytest.raises(UndeError, match=said):
        index.score(toy.data(4), method=TRAK(projection="none"))
    with pytest.raises(UndeError, match=r"unknown method 'track'.*Did you mean 'trak'"):
        index.score(toy.data(4), method="track")


def test_names(tmp_path):
    assert methods.parse("trak") == TRAK()
    assert methods.parse("tracin") == TracIn()
    assert methods.parse("tracin-cosine") == TracIn(cosine=True)
    assert unde.methods.TRAK is TRAK
    assert methods.for_building("trak").projection == "kron(16)"
    assert TracIn(projection=" kron( 4 )").projection == "kron(4)"
    assert [m.linear for m in (TracIn(), TracIn(cosine=True), TRAK())] == [True, False, True]
    a = toy.build(tmp_path / "i", method=TRAK(damping=1))  # one index, whichever way the number is written
    assert toy.build(tmp_path / "i", method=TRAK(damping=1.0)).manifest.id == a.manifest.id


DESCRIBED = [TracIn(), TracIn(cosine=True, projection="sjlt(9)"), TRAK()]


@pytest.mark.parametrize("method", [*DESCRIBED, TRAK(damping=3, relative=False, form="dual")])
def test_a_description_is_read_back(method):
    assert methods.parse(json.loads(json.dumps(method.describe()))) == method


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: methods.parse("trakk"), "unknown method 'trakk'.*Did you mean 'trak'"),
        (lambda: methods.parse({"name": "new"}), "unknown method 'new'"),
        (lambda: methods.parse({"name": "trak", "dampnig": 1}), "'trak' cannot be made from"),
        (lambda: TRAK(damping=-1), "damping -1 of TRAK: expected a number ≥ 0"),
        (lambda: TRAK(damping=float("nan")), "damping nan of TRAK"),
        (lambda: TRAK(damping=float("inf")), "damping inf of TRAK"),
        (lambda: TRAK(form="prime"), "unknown form 'prime'.*Did you mean 'primal'"),
        (lambda: TRAK(projection="corn(4)"), "unknown projection 'corn'.*Did you mean 'kron'"),
    ],
)
def test_wrong_names(wrong, said):
    with pytest.raises(UndeError, match=said):
        wrong()
