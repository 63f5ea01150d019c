import numpy as np
import pytest
import torch

from refusals import refused
from unde.evaluate.bank.subsets import SubsetPlan


def plan(**changes):
    return SubsetPlan(**{"name": "test", "n_train": 40, "subsets": 6, "alpha": 0.5, "seed": 0, **changes})


def test_streams_are_the_same_everywhere_and_for_ever():
    """Fixed bits: banks are continued, and checked, across machines and numpy versions."""
    p = plan(n_train=12, subsets=2, seed=7)
    assert ["".join(map(str, mask.astype(int))) for mask in p.masks()] == ["010001110110", "011100011010"]
    assert [p.train_seed(0, 0), p.train_seed(0, 1), p.train_seed(1, 0)] == [1834709978, 856967280, 3983357107]


def test_a_subset_depends_on_its_number_and_the_seed_only():
    few, many = plan(subsets=6), plan(subsets=50)
    np.testing.assert_array_equal(few.masks(), many.masks()[:6])
    assert (few.mask(3) != plan(seed=1).mask(3)).any()
    assert len(np.unique(many.masks(), axis=0)) == 50


def test_training_seeds_differ_over_subsets_repeats_and_banks():
    seeds = {plan(seed=b).train_seed(s, r) for b in range(3) for s in range(20) for r in range(3)}
    assert len(seeds) == 180
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize(
    ("n_train", "alpha", "size"), [(40, 0.5, 20), (41, 0.5, 21), (10, 0.25, 3), (3, 0.1, 0)]
)
def test_size_is_the_nearest_whole_number(n_train, alpha, size):
    if size == 0:
        refused(r"alpha is 0\.1", plan, n_train=n_train, alpha=alpha)
    else:
        p = plan(n_train=n_train, alpha=alpha)
        assert set(p.masks().sum(1)) == {size} == {p.subset_size}


@pytest.mark.parametrize("stratified", [False, True])
def test_every_example_and_every_pair_is_equally_likely(stratified):
    labels = np.array([0] * 5 + [1] * 4 + [2]) if stratified else None
    masks = plan(n_train=10, alpha=0.5, subsets=4000, stratify=labels).masks().astype(float)
    chance = masks.mean(0)
    assert np.abs(chance - 0.5).max() < 0.04  # five standard errors
    together = (masks.T @ masks / 4000)[:5, :5][np.triu_indices(5, 1)]
    assert np.ptp(together) < 0.075  # examples of one class are alike


def test_stratified_subsets_take_their_share_of_each_class():
    labels = np.random.default_rng(0).permutation(np.repeat(["cat", "dog", "owl"], [60, 25, 15]))
    p = plan(n_train=100, alpha=0.3, subsets=30, stratify=labels)
    for mask in p.masks():
        assert mask.sum() == 30
        counts = [mask[labels == name].sum() for name in ("cat", "dog", "owl")]
        assert counts[0] == 18
        assert counts[1] in (7, 8)
        assert counts[2] in (4, 5)


def test_config_tells_groupings_apart_but_not_their_spelling():
    numbers = [0, 1, 0, 2] * 10
    told = [
        plan(stratify=labels).config()["stratify"] for labels in (np.array(numbers), torch.tensor(numbers))
    ]
    assert told[0] == told[1] == plan(stratify=np.array(numbers, dtype=np.int8)).config()["stratify"]
    assert told[0] != plan(stratify=np.array(numbers[::-1])).config()["stratify"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 1.0}, "alpha is 1.0"),
        ({"alpha": -0.5}, "alpha is -0.5"),
        ({"subsets": 0}, "subsets is 0"),
        ({"n_train": 0}, "n_train is 0"),
        ({"seeds_per_subset": 0}, "seeds_per_subset is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"stratify": np.zeros(39)}, r"stratify has shape \(39,\).* 40 training"),
    ],
)
def test_bad_plans(change, message):
    refused(message, plan, **change)
