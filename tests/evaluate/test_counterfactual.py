"""Removals and choices against a training whose outcome is known, what is kept, and refusals."""

import numpy as np
import pytest
import torch

from refusals import refused
from unde.evaluate import compare_choices, counterfactual
from unde.evaluate.counterfactual import two_way_estimate

N = 24
DATA = torch.linspace(0, 1, N)
QUERIES = torch.tensor([0.1, 0.5, 0.9])
NEAR = -(DATA - QUERIES[:, None]).abs()  # the nearest ones pull the mean to the query
trained = []


def train(indices, seed):
    trained.append(len(indices))
    return DATA[indices].mean() + seed % 5 / 1000


def utility(model):
    return -(model - QUERIES).abs()


def predict(model):
    return (model > QUERIES + 0.02).long()


def by_hand(rows, k, q, seed):
    kept = [i for i in range(N) if i not in rows[:k]]
    return float(utility(train(list(range(N)), seed))[q] - utility(train(kept, seed))[q])


@pytest.mark.parametrize("of", ["query", "set"])
def test_drops_are_those_of_a_loop(of):
    result = counterfactual(NEAR, train, utility, [3, 8], of=of, seeds=2)
    seeds = np.random.SeedSequence(0).generate_state(2, np.uint32).tolist()
    for q in range(3):
        rows = (NEAR.mean(0) if of == "set" else NEAR[q]).argsort(descending=True, stable=True).tolist()
        for k in (3, 8):
            want = [by_hand(rows, k, q, seed) for seed in seeds]
            np.testing.assert_allclose(result.values["scores"][result.ks.index(k), q], want, atol=1e-6)
            draws = [np.random.default_rng([0, r]).permutation(N).tolist() for r in range(2)]
            want = [by_hand(draw, k, q, seed) for draw, seed in zip(draws, seeds)]
            np.testing.assert_allclose(result.values["random"][result.ks.index(k), q], want, atol=1e-6)
    assert result.trainings == (2 * (1 + 2 + 3 * 2) if of == "query" else 2 * (1 + 2 + 2))
    assert result.flips is None and "more than random" in repr(result)
    refused("predictions were not measured", result.smallest, "scores")


def test_equal_removals_are_trained_once_and_several_rankings_are_compared():
    trained.clear()
    result = counterfactual({"near": NEAR, "twice": NEAR, "far": -NEAR}, train, utility, [3], seeds=2)
    assert len(trained) == result.trainings == 2 * (1 + 1 + 3 * 2)
    np.testing.assert_array_equal(result.values["near"], result.values["twice"])
    assert result.excess("near", 3).mean > result.excess("far", 3).mean
    assert [row[0] for row in result.rows()] == ["near", "twice", "far", "random"]
    assert set(result.as_dict()["rankings"]["near"]["3"]) == {"drop", "excess"}


def test_the_smallest_removal_that_flips():
    result = counterfactual(NEAR, train, utility, [2, 6, 12], predict=predict)
    smallest = result.smallest("scores")
    rows = NEAR[1].argsort(descending=True).tolist()
    model, base = [DATA[[i for i in range(N) if i not in rows[:k]]].mean() for k in (2, 6, 12)], DATA.mean()
    flipped = [bool(predict(m)[1] != predict(base)[1]) for m in model]
    assert smallest[1] == ([2, 6, 12][flipped.index(True)] if any(flipped) else np.inf)
    assert result.flipped("scores", 12) >= result.flipped("scores", 2)
    assert result.rows()[0][-1].endswith("%")


def test_results_are_kept_and_resumed(tmp_path):
    def interrupt(indices, seed):
        if len(trained) == 4:
            raise RuntimeError("stop")
        return train(indices, seed)

    trained.clear()
    options = {"ks": [3], "seeds": 2, "path": tmp_path / "removals", "name": "removals"}
    refused("stop", counterfactual, NEAR, interrupt, utility, **options)
    result = counterfactual(NEAR, train, utility, **options)
    assert len(trained) == result.trainings
    np.testing.assert_array_equal(
        result.values["scores"], counterfactual(NEAR, train, utility, **options).values["scores"]
    )
    assert len(trained) == result.trainings  # all were there
    assert counterfactual(-NEAR, train, utility, **options).trainings == result.trainings  # beside the first
    np.testing.assert_array_equal(
        result.values["scores"], counterfactual(NEAR, train, utility, **options).values["scores"]
    )
    assert len(trained) == 2 * result.trainings
    refused("another plan", counterfactual, NEAR, train, utility, **options | {"name": "another"})


def test_choices_are_compared_with_random_ones():
    def measure(model):
        return {"low": utility(model)[:1], "rest": utility(model)[1:]}

    result = compare_choices({"low": range(6), "high": torch.arange(18, N)}, train, measure, N, seeds=4)
    assert result.targets == ["low", "rest"] and result.sizes == {"random": 6, "low": 6, "high": 6}
    assert result.gain("low", "low").mean > 0 > result.gain("high", "low").mean
    model = DATA[:6].mean() + torch.tensor([0.1, 0.1])[0] * 0
    np.testing.assert_allclose(result.utility("low", "low").mean, float(utility(model)[0]), atol=5e-3)
    assert result.rows()[1][:2] == ["low", "6"] and "gain" in result.as_dict()["low"]["targets"]["low"]
    refused("unknown choice", result.gain, "middle", "low")


def test_intervals_cover_queries_and_seeds():
    rng = np.random.default_rng(0)
    alike = rng.normal(size=(40, 1)) + np.zeros((40, 3))
    e = two_way_estimate(alike)
    assert e.ci95_total == pytest.approx(e.ci95, rel=1e-6)  # seeds that agree add nothing
    shifted = alike + np.array([-5.0, 0.0, 5.0])
    assert two_way_estimate(shifted).ci95_total > 5
    assert two_way_estimate(alike[:, :1]).ci95_total is None


def test_refusals():
    for ks in ([], [0], [N], [3, 99]):
        refused("numbers of examples to remove", counterfactual, NEAR, train, utility, ks)
    refused("unknown of 'all'", counterfactual, NEAR, train, utility, [3], of="all")
    refused("other names than 'random'", counterfactual, {"random": NEAR}, train, utility, [3])
    refused("expected one for all", counterfactual, {"a": NEAR, "b": NEAR[:, 1:]}, train, utility, [3])
    refused("NaN", counterfactual, NEAR * torch.nan, train, utility, [3])
    refused("one for each query", counterfactual, NEAR[:2], train, utility, [3])
    refused("seeds is 0", counterfactual, NEAR, train, utility, [3], seeds=0)
    refused("must list examples", compare_choices, {"a": []}, train, utility, N)
    refused("must list examples", compare_choices, {"a": [N]}, train, utility, N)
    refused("other names", compare_choices, {}, train, utility, N)
