"""Candidates of a small store looked at again: against gradients by plain backward passes, and against scoring all."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import toy
from unde import Groups, Index, UndeError, learn_weights
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.scoring import CandidateScores
from unde.scoring.top import Top
from unde.tasks import Classification, Regression

N, K = 40, 12
QUERIES = toy.data(7, seed=3)
W = torch.tensor([0.3, 1.7])
LAYERS = (slice(0, 36), slice(36, 57))  # of a gradient
SMALL = "kron(2)"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An index of few features."""
    return toy.build(tmp_path_factory.mktemp("small") / "i", N, method=TracIn(projection=SMALL), ids=NAMES)


NAMES = [f"row-{i}" for i in range(N)]


def close(got, want, tolerance=1e-5):
    scale = float(want.abs().max())
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance * scale)


def by_layer(model=None, queries=QUERIES, train=None, task=None):
    """(Q, N, 2): inner products of gradients, one backward pass for each example."""
    model, task = model or toy.net(), task or Classification()
    q = toy.gradients(model, task, queries).double()
    n = toy.gradients(model, task, train or toy.data(N)).double()
    return torch.stack([q[:, c] @ n[:, c].T for c in LAYERS], 2)


def picked(all_scores, rescored):
    """Of the scores (Q, N, …) of all examples, those of candidates."""
    return torch.stack([row[where] for row, where in zip(all_scores, rescored.indices)])


@pytest.mark.parametrize("memory", ["50MB", "2kB"])
def test_whole_gradients_of_candidates(small, memory):
    """In 2 kB two queries are a block, and candidates come one by one."""
    scores = toy.reopen(small, train_data=toy.data(N), memory=memory).score(QUERIES)
    top = scores.top(K, W)
    found = scores.rescore(top)
    assert isinstance(found, CandidateScores) and found.shape == (7, K)
    assert [set(row) for row in found.indices.tolist()] == [set(row) for row in top.indices.tolist()]
    want = picked(by_layer(), found)
    close(found.by_group(), want)
    close(found.total(), want.sum(2))
    close(found.total(W), want @ W.double())
    # the small one is off
    assert float((found.total() - picked(scores.total(), found)).norm() / want.norm()) > 0.05


def test_a_larger_projection_is_that_of_an_index_with_it(small, tmp_path):
    larger = toy.build(tmp_path / "i", N, method=TracIn(projection="kron(4)"))
    found = small.score(QUERIES).rescore(K, projection="kron(4)")
    want = larger.score(QUERIES)
    close(found.total(W), picked(want.total(W), found))
    assert found.method == larger.method and found.provenance["method"]["projection"] == "kron(4)"


def test_cosines(small, tmp_path):
    found = small.score(QUERIES, TracIn(cosine=True)).rescore(K)
    parts = by_layer() @ W.double()
    squares = [
        torch.stack([g[:, c].double().square().sum(1) for c in LAYERS], 1) @ W.double()
        for g in (toy.gradients(toy.net(), Classification(), x) for x in (QUERIES, toy.data(N)))
    ]
    want = parts / (squares[0][:, None] * squares[1]).sqrt()
    close(found.total(W), picked(want, found))
    whole = found.regroup({"both": found.groups})
    both = by_layer().sum(2) / (by_layer_norm(QUERIES)[:, None] * by_layer_norm(toy.data(N)))
    close(whole.total(), picked(both, found))


def by_layer_norm(data):
    return toy.gradients(toy.net(), Classification(), data).double().norm(dim=1)


def test_checkpoints_are_added_up(tmp_path):
    states = [toy.net(s).state_dict() for s in (1, 2)]
    options = {"checkpoints": states, "checkpoint_weights": [0.7, 0.1]}
    index = toy.build(tmp_path / "i", N, method=TracIn(projection=SMALL), **options)
    found = index.score(QUERIES).rescore(K)
    want = 0.7 * by_layer(toy.net(1)) + 0.1 * by_layer(toy.net(2))
    close(found.by_group(), picked(want, found))
    now = index.model.state_dict()
    assert all(torch.equal(v, now[k]) for k, v in toy.net().state_dict().items())  # the model is as it was
    index.score(QUERIES)


class Numbered(Classification):
    """A loss that depends on the number of an example, as tasks do that draw noise or labels by it."""

    def measure(self, model, batch, *, name="loss", ids=None):
        numbers = torch.zeros(len(batch[0])) if ids is None else torch.as_tensor(ids)
        return self.loss(model, batch) * (1 + numbers)


def test_candidates_keep_the_numbers_they_were_measured_under(tmp_path):
    index = toy.build(tmp_path / "i", N, task=Numbered(), method=TracIn(projection=SMALL))
    index.remove(indices=[0, 5])
    left = [i for i in range(N) if i not in (0, 5)]
    found = index.score(QUERIES).rescore(K)
    numbers = 1 + torch.tensor(left)
    want = by_layer()[:, left] * numbers[:, None] * torch.arange(1, 8)[:, None, None]
    close(found.by_group(), picked(want, found))


class Moved(TensorDataset):
    by = 0.0

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + self.by * (i == 3), y


def test_queries_that_read_differently(small):
    queries = Moved(*QUERIES)
    scores = small.score(queries)
    scores.rescore(K)
    queries.by = 1.0
    with pytest.raises(UndeError, match="example 3 of the queries reads differently"):
        scores.rescore(K)


def test_the_model_has_no_hooks_left(small):
    small.score(QUERIES).rescore(K)
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in small.model.modules()
    )


KERNELS = {
    "tracin": TracIn(projection="none"),
    "cosine": TracIn(projection="none", cosine=True),
    "trak": TRAK(projection="kron(4)"),
    "logra": LoGRA(projection="kron(4)"),
    "ekfac": EKFAC(projection="kron(4)"),
}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_another_index(tmp_path, name, dtype):
    small = toy.build(tmp_path / "s", N, method=type(KERNELS[name])(projection="kron(2)"))
    larger = toy.build(tmp_path / "l", N, method=KERNELS[name], store_dtype=dtype)
    for memory in ("50MB", "60kB"):  # blocks are kept, or not
        other = toy.reopen(larger, memory=memory)
        scores = small.score(QUERIES, method=TracIn(cosine=True) if name == "cosine" else None)
        found, want = scores.rescore(scores.top(K), index=other), other.score(QUERIES)
        close(found.total(W), picked(want.total(W), found))
        close(found.by_group(), picked(want.by_group(), found))
        top = found.top(3, W)
        assert torch.equal(top.values, found.total(W).sort(1, descending=True).values[:, :3])


def test_only_candidates_are_unpacked(tmp_path, monkeypatch):
    small = toy.build(tmp_path / "s", N, method=TracIn(projection=SMALL))
    other = toy.build(tmp_path / "l", N, store_dtype="int8", memory="10kB")
    codec, seen = toy.stored(other).codec, []
    unpack = type(codec).unpack

    def counted(self, shard, columns):
        seen.append(len(shard["features"]))
        return unpack(self, shard, columns)

    scores = small.score(QUERIES)
    distinct = scores.top(1).indices.unique()
    monkeypatch.setattr(type(codec), "unpack", counted)
    scores.rescore(1, index=other)
    assert sum(seen) == len(distinct) < N / 2


def test_features_of_queries_in_place_of_queries(small, tmp_path):
    larger = toy.build(tmp_path / "l", N)
    scores = small.score(small.features(QUERIES))
    with pytest.raises(UndeError, match="made from features of queries, not from queries"):
        scores.rescore(K)
    want = small.score(QUERIES).rescore(K).total()
    close(scores.rescore(K, queries=QUERIES).total(), want)
    alone = Index.open(larger.folder)  # without a model
    close(scores.rescore(K, index=alone, queries=larger.features(QUERIES)).total(), want)


def test_the_best_are_those_of_all_if_all_are_candidates(small, tmp_path):
    found, want = small.score(QUERIES).rescore(N), toy.build(tmp_path / "l", N).score(QUERIES)
    for largest in (True, False):
        a, b = found.top(5, W, largest), want.top(5, W, largest)
        assert torch.equal(a.indices, b.indices)
        assert a.ids == [[NAMES[i] for i in row] for row in b.indices.tolist()]
        close(a.values, b.values)
    pytest.importorskip("pandas")
    table = found.top(2).to_pandas()
    assert list(table.columns) == ["query", "query_id", "rank", "index", "id", "score"] and len(table) == 14


def test_of_equal_scores_the_earlier_example_is_first(tmp_path):
    """Gradients of squared errors of whole numbers are whole numbers: equal examples have equal scores, not nearly."""
    model = nn.Linear(toy.FEATURES, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 3.0, 1.0, 2.0]]))
        model.bias.fill_(1.0)
    (x, y), (queries, labels) = ((x.mul(3).round(), y.float()) for x, y in (toy.data(6), QUERIES))
    twice = (torch.cat([x, x]), torch.cat([y, y]))
    options = {"model": model, "task": Regression(), "method": TracIn(projection="sjlt(3)")}
    index = toy.build(tmp_path / "i", train_data=twice, **options)
    found = index.score((queries, labels)).rescore(torch.arange(11, -1, -1).repeat(7, 1)).top(12)
    for row, values in zip(found.indices.tolist(), found.values):
        assert all(row.index(i) < row.index(i + 6) for i in range(6))
        assert len(values.unique()) > 3


def test_some_queries_other_groups_and_candidates_from_elsewhere(small):
    scores = small.score(QUERIES)
    where = torch.stack([torch.randperm(N, generator=torch.Generator().manual_seed(q))[:K] for q in range(7)])
    found = scores.rescore(where.numpy())
    want = picked(by_layer(), found)
    assert torch.equal(found.indices, where.sort(1).values)
    some = torch.tensor([4, 1])
    close(found.select(some).total(W), want[some] @ W.double())
    close(scores.select(some).rescore(where[some]).total(W), want[some] @ W.double())
    tensors = Groups.by_tensor(small.model)
    fine = scores.regroup(tensors).rescore(where)
    coarse = fine.regroup({"weights": ["0.weight", "2.weight"], "biases": ["0.bias", "2.bias"]})
    assert coarse.groups == ["weights", "biases"]
    close(coarse.by_group()[..., 1], fine.by_group()[..., 1] + fine.by_group()[..., 3])
    close(coarse.total(), want.sum(2))


def test_weights_remember_their_queries_and_documents_have_no_sums(small):
    found = small.score(QUERIES).rescore(K)
    weights = learn_weights(found, k=3, weight_decay=1.0)
    assert weights.groups == found.groups
    with pytest.raises(UndeError, match="learned on 7 of these 7 queries"):
        found.top(3, weights)
    with pytest.raises(UndeError, match="cannot be ranked by some of their pieces"):
        found.top(2, by=["a"] * N)
    with pytest.raises(UndeError, match="candidates of their own"):
        found.top(2, queries=["a"] * 7)
    assert found.top(2, queries=list("abcdefg")).query_ids == list("abcdefg")
    with pytest.raises(UndeError, match=rf"top\({K + 1}\) of {K} candidates"):
        found.top(K + 1)


def test_kernels_need_an_index(tmp_path):
    index = toy.build(tmp_path / "i", N, method=TRAK(projection=SMALL))
    said = r"TRAK has a kernel, which is fitted to .* pass it, scores.rescore\(top, index="
    with pytest.raises(UndeError, match=said):
        index.score(QUERIES).rescore(K)
    close(index.score(QUERIES, "tracin").rescore(N).total(), by_layer().sum(2))


FITTED = {
    "ekfac": EKFAC(),
    "damped": EKFAC(damping=3, damping_scope="model"),
    "sampled": EKFAC(fisher="sampled"),
    "diagonal": TracIn(metric="diagonal"),
}


@pytest.mark.parametrize("projection", [SMALL, "factored(1)"])
@pytest.mark.parametrize("name", FITTED)
def test_kernels_that_are_fitted_to_whole_gradients(tmp_path, name, projection):
    method, options = FITTED[name], {"checkpoints": toy.states(1, 2), "checkpoint_weights": [0.7, 0.1]}
    small = toy.build(tmp_path / "s", N, method=replace(method, projection=projection), **options)
    whole = toy.build(
        tmp_path / "w", N, method=replace(method, projection="none"), store_dtype="float32", **options
    )
    found, want = small.score(QUERIES).rescore(K), whole.score(QUERIES)
    assert found.method == want.method
    close(found.by_group(), picked(want.by_group(), found))
    close(found.total(W), picked(want.total(W), found))


def test_kernels_are_fitted_once(tmp_path, monkeypatch):
    index = toy.build(tmp_path / "i", N, method=EKFAC(projection=SMALL))
    first = index.score(QUERIES).rescore(K).by_group()
    monkeypatch.setattr("unde.index.gradient_kernel.fit_eigenvalues", None)  # not again
    assert torch.equal(index.score(QUERIES).rescore(K).by_group(), first)
    small = toy.reopen(index, train_data=toy.data(N), memory="1kB")
    with pytest.raises(UndeError, match=r"eigenvectors of 4 parameters need .* raise memory="):
        small.score(QUERIES).rescore(K)
    with pytest.raises(UndeError, match="fitted to whole gradients, projection='none'"):
        index.score(QUERIES).rescore(K, projection="kron(4)")


@pytest.mark.parametrize("projection", ["none", "kron(4)"])
def test_the_kernel_of_logra_is_fitted_to_a_sample(tmp_path, monkeypatch, projection):
    """Of so few examples the sample has all, as an index has; tensors share the blocks of their layer."""
    options = {"checkpoints": toy.states(1, 2), "checkpoint_weights": [0.7, 0.1], "store_dtype": "float32"}
    small = toy.build(tmp_path / "s", N, method=LoGRA(SMALL), **options)
    larger = toy.build(tmp_path / "l", N, method=LoGRA(projection), **options)
    scores, want = small.score(QUERIES), larger.score(QUERIES)
    found = scores.rescore(K, projection=projection)
    assert found.method == want.method
    close(found.by_group(), picked(want.by_group(), found))
    close(found.total(W), picked(want.total(W), found))
    tensors = Groups.by_tensor(small.model)
    fine = scores.regroup(tensors).rescore(found.indices, projection=projection)
    close(fine.by_group(), picked(want.regroup(tensors).by_group(), fine))
    monkeypatch.setattr("unde.index.gradient_kernel.SAMPLE", N // 2)
    assert not torch.allclose(scores.rescore(K, projection=projection).total(), found.total(), rtol=0.01)
    poor = toy.reopen(small, train_data=toy.data(N), memory="10kB").score(QUERIES)
    with pytest.raises(
        UndeError, match=r"fitted to the features of 20 examples, .* raise memory=, or take a smaller"
    ):
        poor.rescore(K, projection=projection)


@pytest.mark.parametrize(
    ("top", "options", "said"),
    [
        (K, {"projection": "kron(4)", "index": "larger"}, "give one of the two"),
        (K, {"projection": "kronn(4)"}, "projection 'kronn'"),
        (N + 1, {}, rf"top\({N + 1}\) of {N} training examples"),
        (torch.zeros(3, 2, dtype=torch.long), {}, r"candidates of shape \(3, 2\) for 7 queries"),
        (torch.full((7, 1), N), {}, f"from 0 to {N - 1}"),
        (torch.zeros(7, 2, dtype=torch.long), {}, "twice among the candidates of query 0"),
        (torch.zeros(7, 2), {}, "expected \\(7, k\\) positions"),
        (Top(torch.zeros(7, 1, dtype=torch.long), torch.zeros(7, 1), [["speech"]] * 7), {}, "or documents"),
        (K, {"queries": toy.data(3)}, "not the 7 that were scored"),
    ],
)
def test_what_cannot_be(small, top, options, said):
    with pytest.raises(UndeError, match=said):
        small.score(QUERIES).rescore(top, **options)


def test_another_model_or_data_is_refused(small, tmp_path):
    for name, options in (
        ("training data", {"train_data": toy.data(N, seed=9)}),
        ("model", {"model": toy.net(5)}),
    ):
        other = toy.build(tmp_path / name, N, **options)
        with pytest.raises(UndeError, match=f"What differs: the {name}"):
            small.score(QUERIES).rescore(K, index=other)


def test_without_model_or_data(small):
    asked = small.features(QUERIES)
    with pytest.raises(UndeError, match="opened without its model, task"):
        Index.open(small.folder).score(asked).rescore(K, queries=QUERIES)
    with pytest.raises(UndeError, match="opened without its train_data"):
        toy.reopen(small).score(QUERIES).rescore(K)


def test_the_exact_best_of_digits_are_among_few_candidates(tmp_path):
    """Of 1,500 digits, the ten best by whole gradients are among 200 found with 1 in 25 of the features."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x).float() / 16, torch.tensor(y)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:1500]), y[:1500]).backward()
        optimizer.step()
    options = {"method": TracIn(projection="kron(5)"), "store_dtype": "int8", "progress": False}
    index = Index.build(model, Classification(), (x[:1500], y[:1500]), tmp_path / "i", **options)
    queries = (x[1500:1540], y[1500:1540])
    scores = index.score(queries)
    assert index.manifest.width * 25 < sum(p.numel() for p in model.parameters())
    q, n = (toy.gradients(model, Classification(), d) for d in (queries, (x[:1500], y[:1500])))
    exact = (q @ n.T).topk(10).indices

    def recall(top):
        return sum(len(set(a) & set(b)) for a, b in zip(top.indices.tolist(), exact.tolist())) / exact.numel()

    rescored = scores.rescore(200)
    assert recall(scores.top(10)) < 0.6 < 0.9 < recall(rescored.top(10))
