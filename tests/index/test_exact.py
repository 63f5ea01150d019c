"""`unde.attribute`: as an index of whole gradients in float32, without one."""

import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import toy
import unde
from refusals import refused
from unde import Index, UndeError
from unde.data import Rows
from unde.devices import CPU, Compute
from unde.evaluate import lds
from unde.gradients import make_units
from unde.gradients.gauss_newton import GaussNewton
from unde.index import exact, gradient_scores
from unde.index.gradient_kernel import QueryFactors
from unde.methods import EKFAC, TracIn
from unde.parallel import Serial
from unde.parallel.base import pack_job
from unde.scoring import ExactScores, documents
from unde.tasks import CausalLM, Classification

N = 22
TRAIN, QUERIES = toy.data(N), toy.data(5, seed=3)
METHODS = {
    "ekfac": EKFAC(),
    "sampled": EKFAC(fisher="sampled"),
    "true": EKFAC(fisher="true", damping_scope="model"),
    "tracin": TracIn(),
    "diagonal": TracIn(metric="diagonal"),
    "cosine": TracIn(cosine=True),
}


def close(got, want, tolerance=1e-5):
    assert got.shape == want.shape
    assert float((got.double() - want.double()).norm() / want.double().norm()) < tolerance


def attribute(method="auto", model=None, task=None, train=TRAIN, queries=QUERIES, **options):
    defaults = {"progress": False, "memory": "50MB"}
    with toy.cut():
        return unde.attribute(
            model or toy.net(), task or Classification(), train, queries, method, **(defaults | options)
        )


def whole(folder, method, **options):
    """Scores of an index of whole gradients in float32."""
    queries = options.pop("queries", QUERIES)
    index = toy.build(folder, N, method=replace(method, projection="none"), store_dtype="float32", **options)
    return index.score(queries)


class Convolutions(nn.Module):
    """Convolutions, norms with weights, and a parameter that no layer has."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.out = nn.Conv2d(4, 6, 3, stride=2), nn.Linear(6, 3)
        self.mix = nn.Parameter(torch.randn(6, 6) / 4)

    def forward(self, x):
        h = self.second(self.norm(self.first(x)).relu()).relu().mean((2, 3))
        return self.out(h + torch.tanh(h @ self.mix))


def convolutions():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Convolutions()


def pictures(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 7, 7, generator=g), torch.randint(3, (n,), generator=g)


def gpt2():
    """Its head is its table of tokens."""
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 23}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()


def sequences(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(23, (8,), generator=g)} for _ in range(n)]


@pytest.mark.parametrize("name", METHODS)
def test_scores_are_those_of_whole_gradients(tmp_path, name):
    found, want = attribute(METHODS[name]), whole(tmp_path / "i", METHODS[name])
    assert isinstance(found, ExactScores) and found.groups == want.groups
    w = torch.tensor([0.3, 1.7])
    close(found.by_group(), want.by_group())
    close(found.total(), want.total())
    close(found.total(w), want.total(w))
    assert torch.equal(found.top(3, w).indices, want.top(3, w).indices)
    assert found.method == want.method


@pytest.mark.parametrize("method", [EKFAC(), TracIn()], ids=["ekfac", "tracin"])
@pytest.mark.parametrize(
    ("model", "task", "data"),
    [(convolutions, Classification(), pictures), (gpt2, CausalLM(), sequences)],
    ids=["conv", "gpt2"],
)
def test_other_models(tmp_path, model, task, data, method):
    queries = data(4, 3)
    found = attribute(method, model(), task, data(N), queries)
    want = whole(tmp_path / "i", method, model=model(), task=task, train_data=data(N), queries=queries)
    close(found.by_group(), want.by_group())


def logistic(l2):
    """A linear classifier, and g(q)ᵀ (G + l2)⁻¹ g(n) by dense matrices; for it G is the Hessian."""
    model = nn.Linear(toy.FEATURES, toy.CLASSES)
    theta = torch.cat([model.weight.detach().flatten(), model.bias.detach()])

    def loss(theta, x, y):
        weight, bias = theta[: -toy.CLASSES].view(toy.CLASSES, -1), theta[-toy.CLASSES :]
        return nn.functional.cross_entropy(x @ weight.T + bias, y)

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    hessian = torch.func.hessian(loss)(theta, *TRAIN)
    inverse = torch.linalg.inv(hessian + l2 * torch.eye(len(theta)))
    return model, each(theta, *QUERIES) @ inverse @ each(theta, *TRAIN).T


def test_conjugate_gradients_are_exact_for_logistic_regression():
    method = EKFAC(fisher="true", damping=0.01, relative=False)
    torch.manual_seed(0)
    model, want = logistic(0.01)
    close(attribute(method, model, cg=25).total(), want, 1e-4)
    errors = [float((attribute(method, model, cg=n).total() - want).norm()) for n in (0, 2, 5)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_products_of_the_gauss_newton_matrix():
    """Texts, tied weights and attention, against Jᵀ (diag p − p pᵀ) J with the Jacobian of the logits."""
    model, texts = gpt2(), sequences(3)
    units = make_units(model, [name for name, _ in model.named_parameters()], "none", 0)
    v = torch.randn(2, units[-1].stop, generator=torch.Generator().manual_seed(0))
    found = GaussNewton(model, CausalLM(), Rows(texts, CausalLM().collate), units, 2).times(v, "products")
    ids, parameters = torch.stack([t["input_ids"] for t in texts]), dict(model.named_parameters())

    def logits(parameters):
        return torch.func.functional_call(model, parameters, (ids,)).logits[:, :-1]

    with sdpa_kernel(SDPBackend.MATH):
        for one, got in zip(v, found):
            moved = {u.name: one[u.columns].view(u.shape) for u in units}
            z, jv = torch.func.jvp(logits, (parameters,), (moved,))
            p = z.softmax(-1)
            bent = p * jv - p * (p * jv).sum(-1, keepdim=True)
            gradients = torch.func.vjp(logits, parameters)[1](bent / 7 / 3)[0]
            close(got, torch.cat([gradients[u.name].flatten() for u in units]).detach(), 1e-4)


def test_conjugate_gradients_say_what_is_left(capsys):
    found = attribute("ekfac", cg=3, progress=True)
    assert found.provenance["cg"] == 3 and found.by_group().isfinite().all()
    assert float(re.search(r"3 steps leave ([\d.]+)% of", capsys.readouterr().err)[1]) < 20


class Inside(Classification):
    """A loss that is not a function of what the model returns."""

    def loss(self, model, batch):
        return super().loss(model, batch) + 1e-3 * model[0].weight.square().sum()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"query_rank": 0}, r"query_rank=0: expected a number of outer products"),
        ({"cg": -1}, r"cg=-1: expected a number of steps"),
        ({"cg": 2, "method": "tracin"}, r"cg=2 with TracIn: conjugate gradients refine EKFAC"),
        ({"cg": 2, "task": Inside()}, r"depends on the parameters in other ways.*Leave cg out"),
    ],
)
def test_conjugate_gradients_refused(options, said):
    with pytest.raises(UndeError, match=said):
        attribute(**{"method": "ekfac"} | options)


@pytest.mark.parametrize("method", [EKFAC(), TracIn()], ids=["ekfac", "tracin"])
def test_queries_may_be_held_as_outer_products(method, capsys):
    """Enough of them are the queries; fewer lose something, and how much is told."""
    options = {"model": convolutions(), "train": pictures(N), "queries": pictures(4, 3), "progress": True}
    whole = attribute(method, **options)
    close(attribute(method, query_rank=50, **options).by_group(), whole.by_group(), 1e-5)
    capsys.readouterr()
    some = attribute(method, query_rank=2, **options)
    error = float((some.total() - whole.total()).norm() / whole.total().norm())
    told = float(re.search(r"are off by ([\d.]+)%", capsys.readouterr().err)[1]) / 100
    assert error / 4 < told < 4 * error and some.provenance["query_rank"] == 2


def test_products_of_outer_products():
    """Packed queries against training gradients, by dense matrices; blocks of queries do not matter."""
    units = [{"shape": [6, 5], "size": 30}, {"shape": [4], "size": 4}, {"shape": [3, 2, 4], "size": 24}]
    g = torch.Generator().manual_seed(0)
    queries, features = torch.randn(7, 58, generator=g), torch.randn(5, 58, generator=g)
    factors, dense = QueryFactors(2, units), queries.clone()
    held = factors.pack(queries)
    for start, rows, size in ((0, 6, 30), (34, 3, 24)):
        u, s, v = torch.linalg.svd(queries[:, start : start + size].view(7, rows, -1), full_matrices=False)
        dense[:, start : start + size] = ((u[..., :2] * s[:, None, :2]) @ v[:, :2]).flatten(1)
    assert held.shape == (7, factors.width) == (7, 2 * 11 + 4 + 2 * 11)
    for most in (2**24, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("unde.index.gradient_kernel._PRODUCTS", most)
            out = factors.products(held, features, [0, 1, 0], torch.zeros(2, 5, 7))
        close(out.sum(0), features @ dense.T)
    off, size = factors.error(queries, held, features)
    close(off, (features @ (queries - dense).T).square().sum(), 1e-4)


def test_diagnosis():
    """A query without a gradient, and lists that are alike."""
    flat = nn.Sequential(nn.Linear(toy.FEATURES, 1), nn.ReLU(), nn.Linear(1, toy.CLASSES, bias=False))
    with torch.no_grad():
        flat[0].bias.fill_(-1)
        flat[0].weight.copy_(torch.eye(toy.FEATURES)[:1])
    x = TRAIN[0].clone()
    x[1:, 0], x[0, 0] = 2 + x[1:, 0].abs(), -5
    queries = x[:2], TRAIN[1][:2]
    scores = attribute("tracin", flat, train=(x, TRAIN[1]), queries=queries, query_ids=["dead", "alive"])
    found = scores.diagnose(scores.top(2))
    assert len(found) == 2 and "1 of 22" in found[0] and "dead" in found[1], found


def test_a_model_that_is_too_large_is_refused_before_it_runs():
    def run(batch):
        raise AssertionError("the model ran")

    with pytest.raises(UndeError, match=r"one query takes 228 B \(57 parameters\).*raise memory="):
        attribute(task=toy.Watched(run), memory=300)
    with pytest.raises(UndeError, match=r"6 vectors that cg=3 holds for one query take 1.37 kB"):
        attribute("ekfac", task=toy.Watched(run), memory=600, cg=3)


def test_auto_is_ekfac():
    assert isinstance(attribute().method, EKFAC)
    close(attribute().total(), attribute("ekfac").total(), 1e-12)


@pytest.mark.parametrize("method", [EKFAC(), TracIn()], ids=["ekfac", "tracin"])
def test_checkpoints_are_added_up(tmp_path, method):
    options = {"checkpoints": toy.states(1, 2), "checkpoint_weights": [0.7, 0.1]}
    model = toy.net()
    found = attribute(method, model, **options)
    close(found.by_group(), whole(tmp_path / "i", method, **options).by_group())
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in toy.net().state_dict().items())


@pytest.mark.parametrize("method", [EKFAC(), TracIn(cosine=True)], ids=["ekfac", "cosine"])
def test_queries_that_do_not_fit_are_asked_in_several_passes(capsys, method):
    large = attribute(method)
    size = 4 * 57  # bytes of a gradient
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_scores, "fit_to_gradients", _within(gradient_scores.fit_to_gradients))
        small = attribute(method, memory=2 * 2 * size + 1, batch_size=4)
    assert (
        "5 queries take 3 passes over the training data: the gradients of 2 (228 B each)"
        in capsys.readouterr().err
    )
    close(small.by_group(), large.by_group(), 1e-6)
    close(small.total(), large.total(), 1e-6)


def _within(fit):
    """With room for the eigenvectors, which are larger than such gradients."""
    room = Compute(CPU, 10**8)
    return lambda method, runner, rows, c, memory, there, *options: fit(
        method, runner, rows, c, 10**8, room, *options
    )


def test_a_query_that_does_not_fit():
    refused(r"the gradient of one query takes 228 B.*raise memory=", attribute, memory=300)


def test_scores_in_a_file(monkeypatch):
    """Where they do not fit the budget they are read from a file, with the same results."""
    large = attribute()
    monkeypatch.setattr("unde.scoring.exact.SHARE", 10**7)
    mapped = attribute()
    assert isinstance(mapped.values, np.memmap)
    assert torch.equal(mapped.total(), large.total())
    assert torch.equal(mapped.top(3).indices, large.top(3).indices)
    one = {"all": large.groups}
    assert isinstance(mapped.regroup(one).values, np.memmap)
    close(mapped.regroup(one).total(), large.total(), 1e-6)
    refused(r"by_group\(\) of 5 × 22 × 2 .* raise memory=", replace(mapped, memory=100).by_group)


def test_scores_that_fit_no_file(monkeypatch):
    monkeypatch.setattr(exact, "MOST", 500)
    refused("5 queries × 22 examples × 2 groups .* fewer queries, or use coarser groups=", attribute)


def test_what_users_know_works(tmp_path):
    ids = [f"{i // 2}:{i % 2}" for i in range(N)]
    options = {"ids": ids}
    found, want = attribute(TracIn(), **options), whole(tmp_path / "i", TracIn(), **options)
    assert found.top(2).ids == want.top(2).ids
    assert found.top(2, by=documents(ids)).ids == want.top(2, by=documents(ids)).ids
    assert found.query_digests == want.query_digests
    learned = unde.learn_weights(found, k=3)
    close(learned.values, unde.learn_weights(want, k=3).values, 1e-4)
    refused("weights were learned on 5 of these 5 queries", found.total, learned)
    masks = torch.rand(8, N, generator=torch.Generator().manual_seed(0)).numpy() < 0.5
    utility = masks @ want.total().numpy().T
    assert lds(found, masks, utility).mean == pytest.approx(lds(want, masks, utility).mean)
    named = attribute(TracIn(), query_ids=list("abcde"))
    assert named.top(1).query_ids == list("abcde")
    some = found.select(torch.tensor([3, 1]))
    assert (
        torch.equal(some.total(), found.total()[[3, 1]]) and some.query_digests[0] == found.query_digests[3]
    )


def test_queries_that_are_training_examples():
    queries = tuple(torch.cat([q[:2], t[:1]]) for q, t in zip(QUERIES, TRAIN))
    scores = attribute(queries=queries)
    assert scores.trained_on() == [2] and scores.top(2).trained_on() == [2]
    assert scores.select(torch.tensor([2])).trained_on() == [0]
    refused("also in the training data", unde.learn_weights, scores, k=3)


def test_groups_and_excluded_parameters(tmp_path):
    options = {"groups": "tensor", "exclude": ["^2\\."]}
    found, want = attribute(TracIn(), **options), whole(tmp_path / "i", TracIn(), **options)
    assert found.groups == want.groups == ["0.weight", "0.bias"]
    close(found.by_group(), want.by_group())


class Elsewhere(Serial):
    """What another process would be sent, in this one."""

    def __init__(self):
        super().__init__(in_process=False)

    def run(self, function, context, jobs):
        function, context = pickle.loads(pack_job(function, context))
        for job in reversed(jobs):
            function(context, *job)
            yield job


@pytest.mark.parametrize("method", [EKFAC(), TracIn(cosine=True)], ids=["ekfac", "cosine"])
def test_other_processes(method):
    here = attribute(method)
    there = attribute(method, executor=Elsewhere(), recipe="projects:make")
    assert torch.equal(there.values, here.values) and torch.equal(there.total(), here.total())
    refused(
        "gives other data here", attribute, train=toy.data(N, 1), executor=Elsewhere(), recipe="projects:make"
    )
    refused("cannot be sent to another process: name a function", attribute, executor=Elsewhere())
    refused("an array of workers shares an index", attribute, executor="array:0/2")


def test_a_model_that_travels_by_itself():
    given = TracIn(), gpt2(), CausalLM(), sequences(N), sequences(3, 4)
    assert torch.equal(attribute(*given, executor=Elsewhere()).values, attribute(*given).values)


def test_the_model_is_as_it_was():
    model = toy.net().train()
    before = pickle.dumps(model.state_dict())
    attribute(model=model)
    assert model.training and pickle.dumps(model.state_dict()) == before
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("method", ["trak", "logra", "d-trak", "das", "journey-trak"])
def test_methods_that_mix_all_columns(method):
    refused(r"needs the features of all .* use 'ekfac' or 'tracin', or build an index", attribute, method)


@pytest.mark.parametrize("method", [EKFAC(), TracIn()], ids=["ekfac", "tracin"])
def test_bad_examples_are_named(method):
    x, y = (t.clone() for t in TRAIN)
    x[7, 0] = torch.nan
    names = [f"row-{i}" for i in range(N)]
    refused("gradient of example 'row-7' is NaN or infinite", attribute, method, train=(x, y), ids=names)
    refused("gradient of query 1 is NaN or infinite", attribute, method, queries=(x[6:8], y[6:8]))
    y[20] = 9
    refused("example 20 .*has the label 9: expected a class number", attribute, method, train=(TRAIN[0], y))


class Changing:
    """Data that read differently after some readings."""

    def __init__(self, after=0):
        self.left = after

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.left -= 1
        return TRAIN[0][i] + max(0, -self.left), TRAIN[1][i]


def test_data_that_change_under_way():
    """Under the second checkpoint one example, the last that is read, is another."""
    whole = Changing(10**6)
    attribute(TracIn(), train=whole, checkpoints=toy.states(1, 2))
    data = Changing(10**6 - whole.left - 1)
    refused("21 reads differently", attribute, TracIn(), train=data, checkpoints=toy.states(1, 2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "ekfak"}, "Did you mean 'ekfac'"),
        ({"method": EKFAC("kron(4)")}, "exact scores are those of whole gradients. Leave the projection out"),
        ({"task": "classification"}, "the task is a str: expected one of unde.tasks"),
        ({"ids": [1, 2]}, "2 ids for 22 examples"),
        ({"query_ids": [1, 2]}, "2 query_ids for 5 queries"),
        ({"memory": "much"}, "much"),
        ({"batch_size": 0}, "batch_size 0: expected at least 1"),
        ({"exclude": ["."]}, "exclude"),
        ({"device": "cuda:77"}, "cannot use the device 'cuda:77'"),
        ({"train": Changing()}, "differently"),
        ({"queries": (QUERIES[0][:0], QUERIES[1][:0])}, "the data set is empty"),
    ],
)
def test_bad_input(options, said):
    with pytest.raises(UndeError, match=said):
        attribute(**options)


def test_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attribute()
    assert not list(tmp_path.iterdir())
    assert not Index.__dict__.get("attribute")
