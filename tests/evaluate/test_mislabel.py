import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from refusals import refused
from unde.evaluate import mislabel_auc, mislabel_auc_interval


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.sampled_from([2, 4, 1000]), size=st.integers(4, 60))
def test_equals_scikit_learn_with_and_without_ties(seed, levels, size):
    rng = np.random.default_rng(seed)
    scores, flags = rng.integers(0, levels, size).astype(float), rng.random(size) < 0.3
    flags[:2] = True, False
    assert mislabel_auc(scores, flags) == pytest.approx(roc_auc_score(flags, scores), abs=1e-12)
    assert mislabel_auc(torch.tensor(scores), torch.tensor(flags)) == mislabel_auc(scores, flags)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([3, 2, 1, 0], 1.0), ([0, 0, 1, 1], 0.0), ([5, 5, 5, 5], 0.5), ([3, 1, 2, 0], 0.75)],
)
def test_small_cases_by_hand(scores, expected):
    assert mislabel_auc(np.array(scores), np.array([True, True, False, False])) == expected


def test_infinite_scores_have_a_rank():
    assert mislabel_auc(np.array([np.inf, 1.0, -np.inf]), np.array([True, False, False])) == 1


@pytest.mark.parametrize(
    ("scores", "flags", "message"),
    [
        ([1.0, 2.0], [True, True], "all 2 examples are mislabelled"),
        ([1.0, 2.0], [False, False], "all 2 examples are correctly labelled"),
        ([1.0, 2.0, 3.0], [True, False], "3 examples and is_mislabeled 2"),
        ([[1.0, 2.0]], [True, False], r"shape \(N,\), but has shape \(1, 2\)"),
        ([1.0, math.nan, 2.0], [True, False, True], "NaN for 1 examples, the first at 1"),
        ([1.0, 2.0], [3, 7], "only True and False"),
    ],
)
def test_bad_input(scores, flags, message):
    for function in (mislabel_auc, mislabel_auc_interval):
        refused(message, function, np.array(scores), np.array(flags))


@pytest.mark.parametrize(("mislabeled", "spread"), [(60, 2.0), (340, 0.5)])
def test_interval_covers_the_true_area_about_95_times_in_100(mislabeled, spread):
    rng = np.random.default_rng(0)
    flags = np.arange(400) < mislabeled
    area = norm.cdf(1.5 / math.hypot(1, spread))
    hits = 0
    for _ in range(600):
        scores = np.where(flags, rng.normal(1.5, spread, 400), rng.normal(0, 1, 400))
        low, high = mislabel_auc_interval(scores, flags)
        hits += low < area < high
    assert 0.925 <= hits / 600 <= 0.975


def test_no_spread_no_interval():
    flags = np.array([True, True, False, False])
    assert np.isnan(mislabel_auc_interval(np.array([4, 3, 2, 1]), flags)).all()
    assert np.isnan(mislabel_auc_interval(np.array([2, 3, 1, 4]), np.arange(4) == 0)).all()
