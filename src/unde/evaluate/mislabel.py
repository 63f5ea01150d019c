"""Detection of mislabelled training examples: the area under the ROC curve of self-influence."""

from __future__ import annotations

import math

import numpy as np

from unde.errors import UndeError
from unde.evaluate.arrays import Array, booleans, numbers


def mislabel_auc(self_influence: Array, is_mislabeled: Array) -> float:
    """Compute the chance that a mislabelled example has more self-influence than a correct one (a tie counts half).

    Args:
        self_influence: (N,) scores, such as `index.self_influence(normalize_top=10)`, which the paper uses.
        is_mislabeled: (N,) bool.

    Returns:
        The area under the ROC curve: 1 for a perfect detector, 0.5 for a random one.

    Raises:
        UndeError: Shapes differ, a score is NaN, or all examples are of one kind.

    Example:
        >>> mislabel_auc(np.array([5.0, 1.0, 3.0, 2.0]), np.array([True, False, True, True]))
        1.0
        >>> mislabel_auc(np.array([5.0, 1.0, 1.0, 2.0]), np.array([True, False, True, False]))
        0.625
    """
    return float(_placements(self_influence, is_mislabeled)[0].mean())


def mislabel_auc_interval(self_influence: Array, is_mislabeled: Array) -> tuple[float, float]:
    """Compute a 95 % confidence interval for `mislabel_auc`: DeLong's variance on the logit of the area.

    (nan, nan) if one class has a single member or the separation is perfect.

    >>> scores, flags = np.array([6.0, 1.0, 3.0, 2.0, 4.0]), np.array([True, False, True, False, False])
    >>> low, high = mislabel_auc_interval(scores, flags)
    >>> low < mislabel_auc(scores, flags) < high
    True
    """
    wrong, right = _placements(self_influence, is_mislabeled)
    area = float(wrong.mean())
    if min(len(wrong), len(right)) < 2 or area in (0.0, 1.0):
        return math.nan, math.nan
    variance = wrong.var(ddof=1) / len(wrong) + right.var(ddof=1) / len(right)
    half = 1.959964 * math.sqrt(variance) / (area * (1 - area))
    from scipy.special import expit, logit  # slow to import

    return float(expit(logit(area) - half)), float(expit(logit(area) + half))


def _placements(self_influence: Array, is_mislabeled: Array) -> tuple[np.ndarray, np.ndarray]:
    """For each mislabelled example, the share of correct ones below it; for each correct one, the share of
    mislabelled ones above it; ties half. The mean of either is the area under the curve."""
    scores = numbers(self_influence, "self_influence", "(N,)").astype(np.float64)
    flags = booleans(is_mislabeled, "is_mislabeled", "(N,)")
    if scores.shape != flags.shape:
        raise UndeError(
            f"self_influence has {len(scores)} examples and is_mislabeled {len(flags)}: both must be (N,)"
        )
    missing = np.flatnonzero(np.isnan(scores))
    if len(missing):
        raise UndeError(
            f"self_influence is NaN for {len(missing)} examples, the first at {missing[0]}: "
            "they have no rank. Leave them out of both arguments"
        )
    if flags.all() or not flags.any():
        which = "mislabelled" if flags.all() else "correctly labelled"
        raise UndeError(f"all {len(flags)} examples are {which}: the area needs some of both kinds")
    return _share_below(scores[flags], scores[~flags]), 1 - _share_below(scores[~flags], scores[flags])


def _share_below(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """For each value, the share of the others that are smaller, equal ones counted half."""
    ordered = np.sort(others)
    smaller, upto = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return (smaller + upto) / (2 * len(others))
