"""Rank correlations over few retrained models: their mean over queries, what it would be over many, its error."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import stdtrit  # scipy.stats is slow to import


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 on over the first axis of (S, Q); equal values share the mean of theirs.

    >>> average_ranks(np.array([[3.0], [1.0], [3.0]]))[:, 0]
    array([2.5, 1. , 2.5])
    """
    return np.stack([(values < row).sum(0) + ((values == row).sum(0) + 1) / 2 for row in values])


def spearman(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Spearman's ρ over the first axis of (S, Q) and (S, Q); nan where the actual values are all equal.

    >>> spearman(np.array([[1.0], [2.0], [3.0]]), np.array([[1.0], [3.0], [2.0]]))
    array([0.5])
    """
    x, y = (average_ranks(v) - (len(v) + 1) / 2 for v in (predicted, actual))
    xx, yy = (x * x).sum(0), (y * y).sum(0)
    rho = (x * y).sum(0) / np.sqrt(np.where((xx > 0) & (yy > 0), xx * yy, 1.0))
    return np.where(yy > 0, np.where(xx > 0, rho, 0.0), np.nan)


def large_sample_factor(mean: float, models: int) -> float:
    """What a mean ρ over few models is multiplied with to estimate the one over many.

    For normal variables with correlation r, Spearman's ρ over n pairs has the mean
    6/(π(n + 1)) · (asin r + (n − 2) asin(r/2)), which tends to 6/π · asin(r/2) (Moran, 1948).

    >>> round(large_sample_factor(0.0, 8), 3), round(large_sample_factor(0.5, 16), 3)
    (1.125, 1.057)
    """
    if abs(mean) < 1e-6:
        return (models + 1) / models
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _mean_of_sample(middle, models) < abs(mean):
            low = middle
        else:
            high = middle
    return 6 / math.pi * math.asin(high / 2) / _mean_of_sample(high, models)


def _mean_of_sample(r: float, n: int) -> float:
    return 6 / (math.pi * (n + 1)) * (math.asin(r) + (n - 2) * math.asin(r / 2))


def jackknife_means(predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """(S,) mean ρ over queries with each model left out in turn."""
    everything = np.arange(len(actual))
    return np.array(
        [np.nanmean(spearman(predicted[everything != s], actual[everything != s])) for s in everything]
    )


def standard_error(left_out: np.ndarray) -> float:
    """The jackknife's standard error from the values with each model left out."""
    return math.sqrt((len(left_out) - 1) * float(np.var(left_out)))


def quantile(level: float, degrees: int) -> float:
    """Student's t; infinite without degrees of freedom."""
    return float(stdtrit(degrees, level)) if degrees > 0 else math.inf
