"""Scores against explicit sums over queries, training examples, checkpoints and parameters."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unde import Groups, GroupScores, UndeError, Weights, learn_weights
from unde.methods import TRAK, TracIn
from unde.scoring import ArrayFeatures
from unde.scoring.blocks import TopK

SIZES = [3, 1, 4, 2, 5]  # of the units
UNITS = ["a.weight", "a.bias", "b.weight", "b.bias", "c"]
LAYERS = Groups({"a": ("a.weight", "a.bias"), "b": ("b.weight", "b.bias"), "c": ("c",)})
ETAS = [0.7, 0.3]
COLUMNS = [slice(a, a + n) for a, n in zip((0, 3, 4, 8, 10), SIZES)]
D = sum(SIZES)


class CountedFeatures(ArrayFeatures):
    """Counts how often a block is read."""

    count = 0

    def block(self, s):
        self.count += 1
        return super().block(s)


def scores_of(
    q=6, n=23, method=None, cuts=(7, 14, 21, 23), memory=10**9, seed=0, etas=ETAS, skipped=(), **options
):
    g = torch.Generator().manual_seed(seed)
    queries, train = torch.randn(len(etas), q, D, generator=g), torch.randn(len(etas), n, D, generator=g)
    side = CountedFeatures(
        train, dict(zip(UNITS, SIZES)), checkpoint_weights=etas, skipped=skipped, ids=options.get("ids")
    )
    side.cuts = [slice(a, b) for a, b in zip((0, *cuts), cuts)]
    digests = [f"{i:016x}" for i in range(q)]
    return GroupScores(side, queries, method or TracIn(), LAYERS, digests, {"index": "x"}, memory)


def explicit(scores):
    """(Q, N, U) in float64: for each unit Σ_c η_c ⟨q, n⟩, one inner product at a time."""
    train = scores.train.values.double()
    etas = torch.tensor(scores.train.checkpoint_weights, dtype=torch.float64)
    parts = [
        torch.einsum("e,eqd,end->qn", etas, scores.queries[..., c].double(), train[..., c]) for c in COLUMNS
    ]
    return torch.stack(parts, 2)


def by_layer(scores):
    unit = explicit(scores)
    return torch.stack([unit[..., 0] + unit[..., 1], unit[..., 2] + unit[..., 3], unit[..., 4]], 2)


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


W = torch.tensor([0.1, 2.5, 0.4])


@pytest.mark.parametrize("etas", [[1.0], ETAS, [0.2, 0.0, 3.0]])
def test_totals(etas):
    scores = scores_of(etas=etas)
    close(scores.total(), by_layer(scores).sum(2))
    close(scores.total(W), by_layer(scores) @ W.double())
    assert scores.shape == scores.total().shape == (6, 23)


@pytest.mark.parametrize("method", [TracIn(), TracIn(cosine=True), TRAK()])
def test_uniform_weights_are_no_weights_to_the_bit(method):
    scores = scores_of(method=method)
    for uniform in (Weights.uniform(scores.groups), torch.ones(3), [1, 1, 1]):
        assert torch.equal(scores.total(uniform), scores.total())
        assert torch.equal(scores.top(5, uniform).values, scores.top(5).values)


def test_weights_are_matched_by_name_may_be_zero_and_read_nothing_more():
    scores = scores_of()
    weights = Weights(torch.tensor([0.4, 0.1, 2.5]), ["c", "a", "b"])
    assert torch.equal(scores.total(weights), scores.total(W))
    close(scores.total([0, 1, 0]), by_layer(scores)[..., 1])
    scores.train.count = 0
    scores.total()
    unweighted, scores.train.count = scores.train.count, 0
    scores.total(W)
    assert scores.train.count == unweighted == 4


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0, 2.0], r"weights of shape \(2,\) for 3 groups: expected \(3,\)"),
        (torch.ones(1, 3), r"weights of shape \(1, 3\)"),
        ([1.0, -0.1, 1.0], "finite numbers ≥ 0"),
        ([1.0, float("nan"), 1.0], "finite numbers ≥ 0"),
        ([1.0, float("inf"), 1.0], "finite numbers ≥ 0"),
        (Weights.uniform(["a", "b", "d"]), "no weight for 'c'; weights for unknown groups 'd'"),
        (Weights.uniform(["a", "b"]), "no weight for 'c'"),
    ],
)
def test_weights_that_do_not_fit(weights, said):
    scores = scores_of()
    for use in (scores.total, lambda w: scores.top(2, w)):
        with pytest.raises(UndeError, match=said):
            use(weights)


@pytest.mark.parametrize("method", [TracIn(), TracIn(cosine=True)])
def test_by_group_is_the_linear_part(method):
    scores = scores_of(method=method)
    close(scores.by_group(), by_layer(scores))
    linear = replace(scores, method=TracIn())
    close(scores.by_group().sum(2), linear.total(), 2e-6)
    close(scores.by_group() @ W, linear.total(W), 2e-6)


def test_by_group_within_the_budget():
    need = 4 * 6 * 23 * 3
    scores_of(memory=need).by_group()
    with pytest.raises(UndeError, match=r"by_group\(\) of 6 × 23 × 3 needs .* score fewer queries, regroup"):
        scores_of(memory=need - 1).by_group()


@pytest.mark.parametrize("memory", [1, 8 * 2 * 3 * 5, 10**9])
def test_blocks_of_contributions(memory):
    """In order, without gap or overlap, no larger than the budget; together they are by_group."""
    scores = scores_of(memory=memory)
    want, next_row = scores_of().by_group()[2:4], 0
    for rows, part in scores.stream(slice(2, 4)):
        assert rows.start == next_row
        assert part.permute(2, 0, 1).is_contiguous()
        assert 2 * part.numel() * 4 <= max(memory, 2 * 4 * 2 * 3)
        close(part, want[:, rows], 1e-6)
        next_row = rows.stop
    assert next_row == 23
    close(scores.contributions(slice(2, 4)), want, 1e-6)


def test_regrouping_by_names_sums_groups():
    scores = scores_of()
    coarse = scores.regroup({"ends": ["c", "a"], "middle": ["b"]})
    assert coarse.groups == ["ends", "middle"]
    parts = by_layer(scores)
    close(coarse.by_group(), torch.stack([parts[..., 0] + parts[..., 2], parts[..., 1]], 2))
    assert torch.equal(coarse.total(), scores.total())
    close(coarse.total([2.0, 0.5]), scores.total([2.0, 0.5, 2.0]))
    assert coarse.query_digests == scores.query_digests


def test_regrouping_by_parameters_may_cut_across_groups():
    scores, unit = scores_of(), explicit(scores_of())
    kinds = Groups({"bias": ("a.bias", "b.bias"), "weight": ("a.weight", "b.weight", "c")})
    want = torch.stack([unit[..., 1] + unit[..., 3], unit[..., 0] + unit[..., 2] + unit[..., 4]], 2)
    close(scores.regroup(kinds).by_group(), want)
    tensors = Groups({u: (u,) for u in UNITS})
    close(scores.regroup(kinds).regroup(tensors).by_group(), unit)  # finer again: nothing was lost
    one = scores.regroup(Groups({"all": tuple(UNITS)}))
    close(one.by_group()[..., 0], scores.total())


@settings(max_examples=30, deadline=None)
@given(st.permutations(UNITS), st.sets(st.integers(1, 4), max_size=4), st.data())
def test_any_partition_of_the_parameters(order, cuts, data):
    bounds = [0, *sorted(cuts), 5]
    members = {f"g{a}": tuple(order[a:b]) for a, b in pairwise(bounds)}
    scores, unit = scores_of(), explicit(scores_of())
    regrouped = scores.regroup(Groups(members))
    want = torch.stack([sum(unit[..., UNITS.index(p)] for p in g) for g in members.values()], 2)
    close(regrouped.by_group(), want)
    weight = st.just(0.0) | st.floats(2**-20, 4, width=32)  # scores below the range of float32 are refused
    w = data.draw(st.lists(weight, min_size=len(members), max_size=len(members)))
    close(regrouped.total(w), want @ torch.tensor(w, dtype=torch.float64), 1e-4)


def test_groups_that_do_not_fit():
    scores = scores_of()
    with pytest.raises(UndeError, match=r"unknown group 'middel'.*Did you mean 'middle'"):
        scores.regroup({"x": ["a", "b"], "middle": ["c"]}).regroup({"y": ["middel", "x"]})
    with pytest.raises(UndeError, match="leave out 'c'"):
        scores.regroup({"x": ["a", "b"]})
    with pytest.raises(UndeError, match="is in groups 'x' and 'y'"):
        scores.regroup({"x": ["a", "b"], "y": ["b", "c"]})
    with pytest.raises(UndeError, match="name unknown 'd'"):
        scores.regroup(Groups({"x": tuple(UNITS), "y": ("d",)}))
    with pytest.raises(UndeError, match="no weight for 'all'"):
        scores.regroup({"all": ["a", "b", "c"]}).total(Weights.uniform(["a", "b", "c"]))


@pytest.mark.parametrize("k", [1, 2, 7, 8, 22, 23])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("method", [TracIn(), TracIn(cosine=True)])
def test_top_is_the_top_of_the_totals(k, largest, method):
    """Also where k is larger than a block, and where the best are in the last block."""
    scores = scores_of(method=method)
    for weights in (None, W):
        want = scores.total(weights).sort(dim=1, descending=largest, stable=True)
        top = scores.top(k, weights, largest=largest)
        assert torch.equal(top.indices, want.indices[:, :k])
        assert torch.equal(top.values, want.values[:, :k])
        assert top.ids == top.indices.tolist()


@pytest.mark.parametrize("k", [0, -1, 24])
def test_more_than_there_are(k):
    with pytest.raises(UndeError, match=rf"top\({k}\) of 23 training examples: expected 1 ≤ k ≤ 23"):
        scores_of().top(k)


@pytest.mark.parametrize("largest", [True, False])
def test_ids_and_skipped_examples(largest):
    scores = scores_of(ids=[f"img{i}" for i in range(23)], skipped=[0, 7, 22])
    top = scores.top(20, largest=largest)
    assert not {0, 7, 22} & set(top.indices.flatten().tolist())
    assert top.ids == [[f"img{i}" for i in row] for row in top.indices.tolist()]
    with pytest.raises(UndeError, match=r"top\(21\) of 20 training examples \(3 more were skipped\)"):
        scores.top(21)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("cuts", [(23,), (7, 14, 21, 23), tuple(range(1, 24))])
def test_equal_scores_are_in_order_whatever_the_blocks(largest, cuts):
    """Whole numbers from few: hundreds of ties, within blocks and across them."""
    scores = scores_of(q=40, cuts=cuts, etas=[1.0])
    scores.queries.round_().clamp_(-1, 1)
    scores.train.values.round_().clamp_(-1, 1)
    want = scores.total().sort(dim=1, descending=largest, stable=True)
    assert int((want.values.diff(dim=1) == 0).sum()) > 300
    for k in (1, 3, 10, 23):
        top = scores.top(k, largest=largest)
        assert torch.equal(top.indices, want.indices[:, :k])
        assert torch.equal(top.values, want.values[:, :k])


@pytest.mark.parametrize("method", [TracIn(), TracIn(cosine=True)])
def test_a_tiny_budget_gives_the_same(method):
    """One query at a time, one training example at a time."""
    large, tiny = scores_of(method=method), scores_of(method=method, memory=1)
    for weights in (None, W):
        close(tiny.total(weights), large.total(weights), 1e-6)
        assert torch.equal(tiny.top(9, weights).indices, large.top(9, weights).indices)
        close(tiny.top(9, weights).values, large.top(9, weights).values, 1e-6)
    assert tiny.train.count == large.train.count  # the training side is still read once a time


def test_cosine_is_the_cosine_of_weighted_features():
    """√(η_c w_j) on both sides, then the plain cosine."""
    scores = scores_of(method=TracIn(cosine=True))
    for weights in (torch.ones(3), W):
        column = weights[[0] * 4 + [1] * 6 + [2] * 5].double()
        scale = (torch.tensor(ETAS, dtype=torch.float64)[:, None] * column).sqrt().unsqueeze(1)
        q = (scores.queries * scale).transpose(0, 1).flatten(1)
        n = (scores.train.values * scale).transpose(0, 1).flatten(1)
        want = torch.nn.functional.cosine_similarity(q.unsqueeze(1), n, dim=2)
        close(scores.total(weights), want, 2e-6)
    assert scores.total().abs().max() < 1


def test_features_of_zeros_have_cosine_zero_and_finite_gradients():
    scores = scores_of(method=TracIn(cosine=True))
    scores.queries[:, 2] = 0
    total = scores.total()
    assert torch.equal(total[2], torch.zeros(23))
    assert total.isfinite().all()
    w = W.clone().requires_grad_()
    scores.finish(scores.by_group() @ w, w, slice(0, 6), slice(0, 23)).sum().backward()
    assert w.grad.isfinite().all()


@pytest.mark.parametrize("queries", [slice(0, 6), slice(2, 5)])
def test_finish_makes_totals_of_weighted_contributions(queries):
    for method in (TracIn(), TracIn(cosine=True)):
        scores = scores_of(method=method)
        for rows, part in scores.stream(queries):
            close(scores.finish(part @ W, W, queries, rows), scores.total(W)[queries, rows], 2e-6)


def test_finish_is_differentiable_in_the_weights():
    scores = scores_of(method=TracIn(cosine=True))
    parts = scores.by_group().double()[:, :9]

    def final(w):
        return scores.finish(parts @ w, w, slice(0, 6), slice(0, 9))

    w = W.double().requires_grad_()
    assert torch.autograd.gradcheck(final, w)
    frozen = torch.autograd.functional.jacobian(
        lambda w: scores.finish((parts @ W.double()).detach(), w, slice(0, 6), slice(0, 9)), W.double()
    )
    assert frozen.abs().max() > 0.1  # the norms, too, move with the weights


@pytest.mark.parametrize("method", [TracIn(), TracIn(cosine=True)])
def test_weights_are_learned_alike_in_any_budget(method):
    large = learn_weights(scores_of(method=method), k=3, epochs=3)
    small = learn_weights(scores_of(method=method, memory=3000), k=3, epochs=3)
    close(small.values, large.values, 1e-4)
    assert large.groups == ["a", "b", "c"]
    assert large.query_digests == scores_of().query_digests
    assert not torch.allclose(large.values, torch.ones(3), atol=1e-3)


def test_printing():
    assert "6 queries × 23 examples × 3 groups" in repr(scores_of())
    assert len(scores_of()) == 6


@given(st.integers(0, 2**20), st.integers(1, 9), st.booleans(), st.sampled_from([2, 5, 10**6]))
@settings(max_examples=60, deadline=None)
def test_the_best_of_blocks_are_those_of_a_stable_sort(seed, k, largest, levels):
    """Scores with many ties, and blocks that cut the queries in different ways."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (6, 60), generator=g).float()
    cuts = sorted({0, 60, *torch.randint(1, 60, (5,), generator=g).tolist()})
    best = TopK(6, k, largest)
    for i, (a, b) in enumerate(pairwise(cuts)):
        step = (2, 2, 6)[i % 3]
        for q in range(0, 6, step):
            best.update(slice(q, q + step), a, scores[q : q + step, a:b])
    want = scores.sort(stable=True, dim=1, descending=largest)
    assert torch.equal(best.values, want.values[:, :k])
    assert torch.equal(best.indices, want.indices[:, :k])
