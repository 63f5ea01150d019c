"""TRAK, LoGRA and EKFAC made of gradients with the labels of the data, sampled labels, or every label."""

import numpy as np
import pytest
import torch
from torch import nn

import toy
from unde import Index, UndeError
from unde.methods import DTRAK, EKFAC, TRAK, LoGRA
from unde.tasks import Classification, MultiLabel, Regression, Task

N, QUERIES = 22, toy.data(5, seed=3)


def double(data):
    return data[0].double(), data[1]


def jacobian(model, x):
    """(outputs, parameters) of one example, by autograd."""
    outputs, parameters = model(x.unsqueeze(0))[0], [*model.parameters()]
    grads = [torch.autograd.grad(out, parameters, retain_graph=True) for out in outputs]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in grads])


def fisher_by_hand(model, x):
    """(N, P, P): Jᵀ (diag p − p pᵀ) J of each example."""
    out = []
    for one in x:
        p, j = model(one.unsqueeze(0))[0].softmax(0).detach(), jacobian(model, one)
        out.append(j.T @ (p.diag() - p.outer(p)) @ j)
    return torch.stack(out)


def rows_of(fisher):
    """Rows g with Σ g gᵀ = Σ_n F_n, and the gradients that scores are made of."""
    model, train = toy.net().double(), double(toy.data(N))
    if fisher == "empirical":
        return toy.gradients(model, Classification(), train).double()
    if fisher == "sampled":
        logits = model(train[0])
        labels = Classification().sample_labels(logits.detach(), range(N))
        return toy.gradients(model, Classification(), (train[0], labels)).double()
    p = model(train[0]).softmax(1).detach()
    labels = [torch.full((N,), c) for c in range(toy.CLASSES)]
    each = [toy.gradients(model, Classification(), (train[0], y)).double() for y in labels]
    return torch.cat([g * p[:, c : c + 1].sqrt() for c, g in enumerate(each)])


def sides():
    model = toy.net().double()
    return [toy.gradients(model, Classification(), double(d)).double() for d in (QUERIES, toy.data(N))]


def columns():
    at, out = 0, {}
    for name, p in toy.net().named_parameters():
        out[name] = slice(at, at + p.numel())
        at += p.numel()
    return out


def close(got, want, tolerance=2e-4):
    assert (got.double() - want).norm() <= tolerance * want.norm()


def test_the_rows_by_hand_are_the_analytic_fisher():
    rows = rows_of("true")
    want = fisher_by_hand(toy.net().double(), double(toy.data(N))[0]).sum(0)
    torch.testing.assert_close(rows.T @ rows, want)


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "true"])
@pytest.mark.parametrize(("damping", "relative"), [(0.1, True), (0.5, False)])
def test_trak_is_the_dense_inverse(tmp_path, fisher, damping, relative):
    q, g = sides()
    gram = rows_of(fisher).T @ rows_of(fisher)
    lam = damping * gram.diagonal().mean() if relative else damping
    want = q @ torch.linalg.inv(gram + lam * torch.eye(len(gram), dtype=torch.float64)) @ g.T
    for form in ("primal", "dual", "auto"):
        method = TRAK(damping=damping, relative=relative, form=form, fisher=fisher, projection="none")
        close(toy.build(tmp_path / form, method=method).score(QUERIES).total(), want)


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "true"])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_logra_is_the_dense_inverse_of_each_layer(tmp_path, fisher, scope):
    q, g = sides()
    rows, want = rows_of(fisher), 0
    for layer in ("0", "2"):
        at = torch.cat(
            [torch.arange(c.start, c.stop) for name, c in columns().items() if name.startswith(layer)]
        )
        gram = rows[:, at].T @ rows[:, at]
        unit = gram.diagonal().mean() if scope == "layer" else (rows**2).sum(0).mean()
        inverse = torch.linalg.inv(gram + 0.2 * unit * torch.eye(len(at), dtype=torch.float64))
        want = want + q[:, at] @ inverse @ g[:, at].T
    method = LoGRA(damping=0.2, fisher=fisher, damping_scope=scope, projection="none")
    close(toy.build(tmp_path / "i", method=method).score(QUERIES).total(), want)


@pytest.mark.parametrize("fisher", ["empirical", "sampled", "true"])
@pytest.mark.parametrize("scope", ["layer", "model", "absolute"])
def test_ekfac_is_the_dense_inverse_in_its_basis(tmp_path, fisher, scope):
    """Bases from gradients of outputs, of each label with the root of its probability; Λ is a mean over examples."""
    q, g = sides()
    rows, model, (x, _) = rows_of(fisher), toy.net().double(), double(toy.data(N))
    repeats = len(rows) // N
    inputs = {"0": x, "2": model[1](model[0](x)).detach()}
    bases, lambdas = {}, {}
    for name, at in columns().items():
        layer, _, kind = name.partition(".")
        if kind == "weight":
            left = rows[:, columns()[f"{layer}.bias"]]  # the gradient of a bias is that of the output
            right = inputs[layer].repeat(repeats, 1)
            basis = torch.from_numpy(np.kron(*(np.linalg.eigh((s.T @ s).numpy())[1] for s in (left, right))))
        else:
            basis = torch.linalg.eigh(rows[:, at].T @ rows[:, at])[1]
        bases[name], lambdas[name] = basis, ((rows[:, at] @ basis) ** 2).sum(0) / N
    whole, want = torch.cat([*lambdas.values()]).mean(), 0
    for name, at in columns().items():
        lam = {"layer": 0.1 * lambdas[name].mean(), "model": 0.1 * whole, "absolute": 0.05}[scope]
        k = bases[name] @ torch.diag(1 / (lambdas[name] + lam)) @ bases[name].T
        want = want + q[:, at] @ k @ g[:, at].T
    settings = {"damping": 0.05, "relative": False} if scope == "absolute" else {"damping_scope": scope}
    method = EKFAC(**{"damping": 0.1} | settings, fisher=fisher, projection="none")
    close(toy.build(tmp_path / "i", method=method).score(QUERIES).total(), want)


@pytest.mark.parametrize("method", [TRAK, LoGRA, EKFAC])
def test_one_index_holds_both(tmp_path, method):
    """Added later they are what a build makes."""
    index = toy.build(tmp_path / "i", method=EKFAC(projection="none"))
    assert index.fishers == ("empirical",)
    with pytest.raises(UndeError, match=r"no gradients with every label: build .*index.add_fisher\('true'\)"):
        index.score(QUERIES, method(fisher="true"))
    index.add_fisher("true", progress=False)
    index.add_fisher("sampled", progress=False)
    assert index.fishers == ("empirical", "sampled", "true")
    scores = [index.score(QUERIES, method(fisher=kind)).total() for kind in index.fishers]
    assert not any(torch.allclose(a, b, rtol=1e-3) for a, b in zip(scores, [*scores[1:], scores[0]]))
    for kind, got in zip(index.fishers, scores):
        built = toy.build(tmp_path / kind, method=method(fisher=kind, projection="none"))
        close(got, built.score(QUERIES).total().double(), 1e-5)
    assert index.verify()


def test_examples_come_and_go(tmp_path):
    method = EKFAC(fisher="true", projection="none")
    x, y = toy.data(N)
    whole = toy.build(tmp_path / "whole", method=method)
    want = whole.score(QUERIES).total()
    part = toy.build(tmp_path / "part", method=method, train_data=(x[:15], y[:15]))
    part.append((x[15:], y[15:]), progress=False)
    close(part.score(QUERIES).total(), want.double())
    assert part.verify()
    fewer = toy.build(tmp_path / "fewer", method=method, train_data=(x[:15], y[:15])).score(QUERIES).total()
    whole.remove(indices=range(15, N))
    close(whole.score(QUERIES).total(), fewer.double())
    halves = [
        toy.build(tmp_path / f"half{i}", method=method, train_data=(x[s], y[s])).folder
        for i, s in enumerate((slice(0, 11), slice(11, N)))
    ]
    merged = Index.merge(halves, tmp_path / "merged")
    assert merged.fishers == ("empirical", "true")
    close(toy.reopen(merged, model=toy.net(), task=Classification()).score(QUERIES).total(), want.double())


def test_expected_is_the_mean_of_sampled_gradients():
    """Of each task, over many draws."""
    torch.manual_seed(0)
    outputs = torch.randn(1, 3, dtype=torch.float64)
    for task in (Classification(), MultiLabel(), Regression()):
        z = outputs.clone().requires_grad_()
        rows = torch.stack(
            [
                torch.autograd.grad(task.fisher_term(z, torch.zeros(1).long(), c).sum(), z)[0][0]
                for c in range(3)
            ]
        )
        want = rows.T @ rows
        many = outputs.repeat(40_000, 1).requires_grad_()
        sampled = task.sample_labels(many.detach(), range(40_000))
        g = torch.autograd.grad(task.compare(many, sampled).sum(), many)[0]
        torch.testing.assert_close(g.T @ g / len(g), want, rtol=0.05, atol=0.01 * float(want.abs().max()))


def test_regression_with_one_output(tmp_path):
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 1), torch.randn(30, 4), torch.randn(30)
    queries = (torch.randn(3, 4), torch.randn(3))
    method = TRAK(damping=2.0, relative=False, fisher="true", projection="none")
    index = Index.build(model, Regression(), (x, y), tmp_path, progress=False, method=method)
    ones = torch.cat([x, torch.ones(30, 1)], 1)
    errors, asked = 2 * (model(x)[:, 0] - y), 2 * (model(queries[0])[:, 0] - queries[1])
    k = torch.linalg.inv(2 * ones.T @ ones + 2.0 * torch.eye(5))
    want = (torch.cat([queries[0], torch.ones(3, 1)], 1) * asked[:, None]) @ k @ (ones * errors[:, None]).T
    torch.testing.assert_close(index.score(queries).total(), want.detach(), rtol=1e-4, atol=1e-5)


class CustomTask(Task):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("method", [TRAK, LoGRA, EKFAC])
def test_too_many_labels_are_refused(tmp_path, method):
    wide = nn.Linear(toy.FEATURES, 33)
    with pytest.raises(UndeError, match=r"fisher='true'.*Classification has 33 labels: use fisher='sampled'"):
        toy.build(tmp_path / "i", model=wide, method=method(fisher="true"))
    with pytest.raises(UndeError, match=r"CustomTask cannot enumerate its labels: use fisher='sampled'"):
        toy.build(tmp_path / "i", task=CustomTask(), method=method(fisher="true"))
    assert not (tmp_path / "i").exists()


def test_other_measures_have_no_fisher():
    with pytest.raises(UndeError, match=r"fisher='true' of DTRAK.*use fisher='empirical'"):
        DTRAK(fisher="true")
    with pytest.raises(UndeError, match=r"damping_scope 'network'"):
        EKFAC(damping_scope="network")


def test_descriptions_of_earlier_releases_stay():
    """New settings are recorded where they are used: ids and resumed builds are as before."""
    assert "fisher" not in TRAK().resolve("language").describe()
    assert TRAK(fisher="true").describe()["fisher"] == "true"
    assert "damping_scope" not in LoGRA().describe()
    assert EKFAC(projection="none").probe is None
    probe = EKFAC(projection="none", fisher="sampled").probe
    assert probe.describe() == {"name": "fisher", "projection": "none"}
