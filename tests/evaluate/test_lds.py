import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.stats import spearmanr

from refusals import refused
from unde.errors import UndeError
from unde.evaluate import lds, paired


def slow_lds(scores, masks, utility):
    """One query, one subset at a time, and scipy's Spearman."""
    found = []
    for q in range(scores.shape[0]):
        predicted = [sum(scores[q, n] for n in np.flatnonzero(mask)) for mask in masks]
        found.append(spearmanr(predicted, utility[:, q]).statistic)
    return np.array(found)


def problem(seed, queries=7, examples=20, subsets=15, ties=True):
    rng = np.random.default_rng(seed)
    masks = rng.random((subsets, examples)) < 0.5
    if ties:  # small whole numbers: sums are exact and often equal
        return rng.integers(-2, 3, (queries, examples)), masks, rng.integers(0, 4, (subsets, queries))
    return rng.normal(size=(queries, examples)), masks, rng.normal(size=(subsets, queries))


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_equals_scipy_in_a_loop(seed, ties):
    scores, masks, utility = problem(seed, ties=ties)
    assert_allclose(lds(scores, masks, utility).per_query, slow_lds(scores, masks, utility), atol=1e-14)


def test_fixed_cases():
    """Rank correlations 1 and √3/2, the values for which other packages have fixed cases too."""
    masks = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=bool)
    scores = np.array([[1.0, 1.0, 2.0, 5.0], [1.0, 2.0, 3.0, 4.0]])
    utility = np.array([[0.1, 1.0], [0.2, 2.0], [0.3, 2.0]])
    assert_allclose(lds(scores, masks, utility).per_query, [1, np.sqrt(3) / 2])


def test_scores_that_are_the_truth_of_a_linear_world_score_one():
    scores, masks, _ = problem(0, ties=False)
    e = lds(scores, masks, masks @ scores.T)
    assert_allclose(e.per_query, 1)
    assert_allclose(lds(-scores, masks, masks @ scores.T).per_query, -1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0.01, 100))
def test_only_ranks_matter(seed, scale):
    scores, masks, utility = problem(seed)
    base = lds(scores, masks, utility).per_query
    np.testing.assert_array_equal(lds(scores * 2.0, masks, np.exp(utility * scale / 100)).per_query, base)
    order = np.random.default_rng(seed).permutation(len(masks))
    assert_allclose(lds(scores, masks[order], utility[order]).per_query, base, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_of_any_precision_and_with_gradients(dtype):
    scores, masks, utility = problem(3)
    e = lds(
        torch.tensor(scores, dtype=dtype, requires_grad=True),
        torch.tensor(masks),
        torch.tensor(utility, dtype=dtype),
    )
    assert_allclose(e.per_query, slow_lds(scores, masks, utility), atol=1e-14)


def test_many_queries_are_summed_in_blocks(monkeypatch):
    scores, masks, utility = problem(4, queries=11)
    monkeypatch.setattr(
        "unde.evaluate.metrics._BLOCK_BYTES", 8 * scores.shape[1] * 3
    )  # three queries in a block
    assert_allclose(lds(scores, masks, utility).per_query, slow_lds(scores, masks, utility), atol=1e-14)


@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_constant_utility_is_undefined_and_constant_prediction_is_zero():
    scores, masks, utility = problem(5, ties=False)
    utility[:, 2] = 0.7
    scores[4] = 0
    e = lds(scores, masks, utility)
    assert np.isnan(e.per_query[2])
    assert e.per_query[4] == 0
    assert e.undefined == 1
    assert np.isnan(slow_lds(scores, masks, utility)[[2, 4]]).all()  # scipy leaves both open
    rest = [0, 1, 3, 4, 5, 6]
    assert e.mean == pytest.approx(e.per_query[rest].mean())


def test_no_query_with_a_varying_utility_is_an_error():
    scores, masks, utility = problem(0)
    refused("really retrained", lds, scores, masks, np.ones_like(utility))


def slow_bootstrap(scores, masks, utility, draws, seed):
    """The same draws, spelled out: subsets repeated as often as drawn."""
    subsets = len(masks)
    counts = np.random.default_rng(seed).multinomial(subsets, np.full(subsets, 1 / subsets), size=draws)
    means = []
    for count in counts:
        rows = np.repeat(np.arange(subsets), count)
        means.append(np.nanmean(slow_lds(scores, masks[rows], utility[rows])))
    return np.array(means)


@pytest.mark.parametrize("ties", [True, False])
def test_bootstrap_equals_resampling_spelled_out(ties):
    scores, masks, utility = problem(6, queries=3, ties=ties)
    fast = lds(scores, masks, utility, bootstrap=25, seed=3)
    means = slow_bootstrap(scores, masks, utility, 25, 3)
    assert_allclose(fast.subset_bootstrap.means, means, atol=1e-12)
    assert fast.subset_bootstrap.standard_error() == pytest.approx(means.std(ddof=1))
    np.testing.assert_array_equal(fast.per_query, lds(scores, masks, utility).per_query)


def test_draws_that_miss_all_variation_are_left_out():
    masks = np.eye(10, dtype=bool)
    utility = np.zeros((10, 1))
    utility[3] = 1.0  # a third of the draws do not contain subset 3
    e = lds(np.arange(10.0)[None], masks, utility, bootstrap=100)
    missed = np.isnan(e.subset_bootstrap.means).mean()
    assert 0.2 < missed < 0.5
    assert np.isfinite(e.subset_bootstrap.standard_error())


def test_total_interval_covers_the_truth_and_the_one_over_queries_does_not():
    """A world in which all queries share the luck of a retraining, as they do in reality."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=40)

    def world(queries, subsets, draws):
        truth = shared + rng.normal(size=(queries, 40))
        scores = truth + 2 * rng.normal(size=(queries, 40))
        masks = rng.random((subsets, 40)) < 0.5
        luck = 5 * rng.normal(size=(subsets, 1)) + 2 * rng.normal(size=(subsets, queries))
        return lds(scores, masks, masks @ truth.T + luck, bootstrap=draws)

    truth = np.mean([world(40, 24, 0).mean for _ in range(150)])
    trials = [world(40, 24, 60) for _ in range(100)]
    covered = np.mean([abs(e.mean - truth) < e.ci95_total for e in trials])
    naive = np.mean([abs(e.mean - truth) < e.ci95 for e in trials])
    assert covered >= 0.9  # 0.95 expected; the chance to fall below is about 1 %
    assert naive < 0.85


def test_paired_difference_under_the_bootstrap_is_that_of_the_same_draws():
    scores, masks, utility = problem(8, queries=4, ties=False)
    better = scores + 0.05 * np.random.default_rng(0).normal(size=scores.shape)
    a, b = (lds(s, masks, utility, bootstrap=30, seed=5) for s in (scores, better))
    d = paired(a, b)
    means = slow_bootstrap(better, masks, utility, 30, 5) - slow_bootstrap(scores, masks, utility, 30, 5)
    assert d.subset_bootstrap.standard_error() == pytest.approx(means.std(ddof=1))
    assert d.ci95_total < a.ci95_total  # what both share cancels
    assert "with subset noise" in str(d)


@pytest.mark.parametrize(
    ("flip", "message"),
    [
        ("scores", r"N is 7 .* total_scores looks transposed: pass total_scores.T"),
        ("masks", r"N is 20 in total_scores \(Q, N\) and 15 in masks \(S, N\).* masks looks transposed"),
        ("utility", r"S is 15 in masks \(S, N\) and 7 in utility \(S, Q\).* utility looks transposed"),
    ],
)
def test_transposed_input_is_recognised(flip, message):
    args = dict(zip(("scores", "masks", "utility"), problem(0)))
    args[flip] = args[flip].T
    refused(message, lds, *args.values())


def test_shapes_that_fit_no_way_are_told_apart():
    scores, masks, utility = problem(0)
    with pytest.raises(UndeError, match=r"Q is 6 .* and 7") as caught:
        lds(scores[:6], masks, utility)
    assert "transposed" not in str(caught.value)
    refused(r"N is 20 .* and 19", lds, scores, masks[:, :19], utility)
    refused(r"utility must have shape \(S, Q\), but has shape \(15,\)", lds, scores, masks, utility[:, 0])
    refused("at least 2 subsets", lds, scores, masks[:1], utility[:1])


def test_positions_instead_of_masks_are_refused_and_zeros_and_ones_accepted():
    scores, masks, utility = problem(0)
    refused("only True and False", lds, scores, np.tile(np.arange(20), (15, 1)), utility)
    refused("only True and False", lds, scores, np.where(masks, "a", "b"), utility)
    same = lds(scores, masks.astype(float), utility)
    np.testing.assert_array_equal(same.per_query, lds(scores, masks, utility).per_query)


def test_broken_numbers_are_found_and_placed():
    scores, masks, utility = problem(0, ties=False)
    scores[3, 8] = np.nan
    refused(r"total_scores has 1 NaN .* query 3, training example 8", lds, scores, masks, utility)
    utility[5, 2] = -np.inf
    refused(r"utility has 1 NaN .* subset 5, query 2", lds, scores, masks, utility)


def test_bootstrap_refuses_what_it_cannot_do():
    scores, masks, utility = problem(0)
    refused("7 subsets are too few", lds, scores, masks[:7], utility[:7], bootstrap=10)
    for draws in (-3, 1):
        refused("number of draws", lds, scores, masks, utility, bootstrap=draws)
