"""Second moments as a diagonal preconditioner, against gradients divided by hand."""

import pytest
import torch
from torch import nn

import toy
from unde import UndeError
from unde.gradients.adam_preconditioner import scales
from unde.methods import EKFAC, TracIn
from unde.projection import Projection
from unde.tasks import Classification

NAMES = [n for n, _ in toy.net().named_parameters()]


def trained(model, optimizer=torch.optim.Adam, steps=3, named=False):
    opt = optimizer(model.named_parameters() if named else model.parameters(), lr=1e-3)
    for seed in range(steps):
        opt.zero_grad()
        Classification().loss(model, toy.data(8, seed=seed)).mean().backward()
        opt.step()
    model.zero_grad()
    return opt


def by_hand(model, opt):
    """(√(v / (1 − β₂ᵗ)) + ε)^−1/2, one parameter after the other."""
    out = []
    for p in model.parameters():
        state = opt.state[p]
        v = state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))
        out.append((1 / (v.sqrt() + 1e-8)).sqrt().flatten())
    return torch.cat(out)


@pytest.mark.parametrize("projection", ["none", "kron(2)", "sjlt(7)", "dense(7)"])
@pytest.mark.parametrize("form", ["optimizer", "state", "named state", "mapping"])
def test_features_are_divided_before_they_are_projected(tmp_path, projection, form):
    model = toy.net()
    opt = trained(model, named=form == "named state")
    scale = by_hand(model, opt)
    given = {"optimizer": opt, "state": opt.state_dict(), "named state": opt.state_dict()}.get(form)
    if form == "mapping":
        given = {n: opt.state[p]["exp_avg_sq"] / (1 - 0.999**3) for n, p in model.named_parameters()}
    index = toy.build(
        tmp_path / "i", model=model, method=TracIn(projection=projection, cosine=True), second_moments=given
    )
    g = toy.gradients(model, Classification(), toy.data(22)) * scale
    want, start = [], 0
    for name, p in model.named_parameters():
        block = g[:, start : start + p.numel()].view(22, *p.shape)
        start += p.numel()
        want.append(Projection(projection, name, tuple(p.shape))(block))
    want = torch.cat(want, 1)
    got = torch.cat([toy.stored(index).block(0, s) for s in range(3)])
    assert (got - want).norm() <= 1e-4 * want.norm()
    queries = toy.data(3, seed=5)
    q = toy.reopen(index).features(queries).features[0]
    cosine = torch.nn.functional.cosine_similarity(q[:, None], want[None], dim=2)
    torch.testing.assert_close(index.score(queries).total(), cosine, rtol=1e-3, atol=1e-4)


def test_what_never_had_a_gradient_does_not_count():
    got = scales({"weight": torch.tensor([[0.0, 4.0]])}, nn.Linear(2, 1, bias=False), ["weight"])
    assert got["scale/weight"].tolist() == [[0.0, pytest.approx(0.5**0.5)]]


def test_another_model_or_optimizer_is_refused(tmp_path):
    model = toy.net()
    wide = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    deep = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    other = trained(wide)
    some = trained(model, named=True).state_dict()
    some["param_groups"][0]["param_names"].pop()
    for given, said in [
        (other, "the optimizer holds none of the model's parameters"),
        (other.state_dict(), r"parameter '0.weight' has shape \(6, 5\), its second moments \(7, 5\)"),
        (trained(deep).state_dict(), "it has 6 parameters, the model 4 that are trained"),
        (some, "names 3 of its 4 parameters"),
        (trained(toy.net(), torch.optim.SGD).state_dict(), "holds no second moments"),
        ({"0.weight": torch.ones(6, 5)}, "no second moments for parameter '0.bias'"),
        ({n: -torch.ones(p.shape) for n, p in model.named_parameters()}, "'0.weight' hold NaN or negative"),
        ("adam.pt", "second_moments is a str"),
    ]:
        with pytest.raises(UndeError, match=said):
            toy.build(tmp_path / "i", model=model, second_moments=given)
    assert not (tmp_path / "i").exists()
    with pytest.raises(UndeError, match="EKFAC needs the two sides"):
        toy.build(tmp_path / "i", model=model, second_moments=trained(model), method=EKFAC())
    opt = trained(model)
    toy.build(tmp_path / "i", model=model, second_moments=opt)
    with pytest.raises(UndeError, match="second moments"):
        toy.build(tmp_path / "i", model=model)


def test_scores_are_in_the_metric_of_the_optimizer(tmp_path):
    """⟨g(q), g(n) / √v⟩, with v of an optimizer or the mean square of training gradients."""
    model = toy.net()
    opt, queries = trained(model), toy.data(3, seed=5)
    g, q = (toy.gradients(model, Classification(), d) for d in (toy.data(22), queries))
    for name, given, v in (
        ("adam", opt, by_hand(model, opt) ** -4),
        ("gradients", "gradients", g.square().mean(0)),
    ):
        index = toy.build(
            tmp_path / name, model=model, method=TracIn(projection="none"), second_moments=given
        )
        want = (q / v.sqrt()) @ g.T
        torch.testing.assert_close(index.score(queries).total(), want, rtol=1e-3, atol=1e-4)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    with pytest.raises(UndeError, match=r"second_moments is a str: .*or 'gradients'"):
        toy.build(tmp_path / "j", model=model, second_moments="gradient")


def test_the_same_metric_from_stored_features(tmp_path):
    """TracIn(metric="diagonal") on any index: K = diag(mean g²)^−1/2; a dead column counts nothing."""
    model, queries = toy.net(), toy.data(3, seed=5)
    x, y = toy.data(22)
    x[:, 1] = 0
    index = toy.build(tmp_path / "i", model=model, train_data=(x, y))
    g, q = (toy.gradients(model, Classification(), d) for d in ((x, y), queries))
    mean = g.square().mean(0)
    want = (q * torch.where(mean > 0, mean.rsqrt(), 0.0)) @ g.T
    got = index.score(queries, TracIn(metric="diagonal"))
    torch.testing.assert_close(got.total(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.by_group().sum(2), got.total(), rtol=1e-4, atol=1e-4)
    assert TracIn().describe() == {"name": "tracin", "projection": None, "cosine": False}
    with pytest.raises(UndeError, match=r"metric 'adam'"):
        TracIn(metric="adam")
    with pytest.raises(UndeError, match=r"cosine=True and metric='diagonal'"):
        TracIn(cosine=True, metric="diagonal")
