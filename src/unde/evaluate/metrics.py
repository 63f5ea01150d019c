"""Metrics of arrays: the linear datamodeling score, Recall@k, and the detection of wrong labels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from unde.errors import UndeError
from unde.evaluate.arrays import Array, booleans, finite, numbers, top_positions
from unde.evaluate.estimate import Estimate, SubsetBootstrap
from unde.scoring.data_splits import refuse_training

FEWEST_SUBSETS_TO_RESAMPLE = 8  # fewer, and a draw that repeats a single subset is no longer rare
_BLOCK_BYTES = 64 * 2**20


@runtime_checkable
class HasTotal(Protocol):
    """Scores with a method `total`, such as those of an index."""

    def total(self) -> Tensor: ...


def lds(
    total_scores: Array | HasTotal, masks: Array, utility: Array, *, bootstrap: int = 0, seed: int = 0
) -> Estimate:
    """Compute the linear datamodeling score: Spearman's ρ between predicted and actual outcomes of retraining.

    The prediction for a subset is the sum of the scores of its examples. Ties have average ranks. A query whose utility
    is the same for all subsets is undefined and left out (see `Estimate.undefined`); a prediction that is the same for
    all subsets counts as 0.

    Args:
        total_scores: (Q, N) scores of N training examples for Q queries, or scores with a method `total()`.
        masks: (S, N) bool, the training examples of each retrained model.
        utility: (S, Q) utility of each retrained model on each query, higher is better, such as −loss.
        bootstrap: Number of resamplings of the subsets, such as 1000, so that `Estimate.ci95_total` covers the noise
            of subsets too; 0 for none.
        seed: Seed of the resampling.

    Returns:
        ρ of each query, and its mean.

    Raises:
        UndeError: Shapes do not fit, values are not finite, queries are training examples, or all are undefined.

    Example:
        >>> scores = np.array([[1.0, 2.0, 4.0], [3.0, 1.0, 0.0]])
        >>> masks = np.array([[True, True, False], [True, False, True], [False, True, True]])
        >>> utility = np.array([[0.1, 0.9], [0.5, 0.5], [0.6, 0.5]])
        >>> lds(scores, masks, utility).per_query.round(3)
        array([1.   , 0.866])
    """
    if isinstance(total_scores, HasTotal):
        refuse_training(total_scores)
        total_scores = total_scores.total()
    total = numbers(total_scores, "total_scores", "(Q, N)")
    chosen = booleans(masks, "masks", "(S, N)")
    actual = numbers(utility, "utility", "(S, Q)").astype(np.float64)
    _check_axes(total.shape, chosen.shape, actual.shape)
    finite(actual, "utility", ("subset", "query"), "leave out or retrain the subsets that diverged")
    return rank_correlation(predict(total, chosen), actual, chosen, bootstrap=bootstrap, seed=seed)


def rank_correlation(
    predicted: np.ndarray, actual: np.ndarray, masks: np.ndarray, *, bootstrap: int = 0, seed: int = 0
) -> Estimate:
    """Spearman's ρ of each query over models, of predictions (S, Q) and utilities (S, Q); see `lds`."""
    per_query = _spearman(predicted, actual, np.ones((1, len(actual))))[:, 0]
    if np.isnan(per_query).all():
        raise UndeError(
            "utility is the same for all subsets, on every query: rank correlation is undefined. "
            "Check that each subset's model was really retrained, and that row s of utility is its own"
        )
    if bootstrap == 0:
        return Estimate(per_query)
    means = _bootstrap(predicted, actual, bootstrap, seed)
    key = hashlib.sha256(np.packbits(masks).tobytes() + actual.tobytes() + b"%d %d" % (bootstrap, seed))
    return Estimate(per_query, SubsetBootstrap(means, len(actual), key.hexdigest()[:16]))


def _check_axes(total: tuple[int, ...], masks: tuple[int, ...], utility: tuple[int, ...]) -> None:
    shapes = {"total_scores": total, "masks": masks, "utility": utility}
    if masks[0] < 2:
        raise UndeError("rank correlation needs at least 2 subsets, masks (S, N) has 1")
    if _fit(shapes):
        return
    wrong = []
    if total[1] != masks[1]:
        wrong.append(f"N is {total[1]} in total_scores (Q, N) and {masks[1]} in masks (S, N)")
    if masks[0] != utility[0]:
        wrong.append(f"S is {masks[0]} in masks (S, N) and {utility[0]} in utility (S, Q)")
    if total[0] != utility[1]:
        wrong.append(f"Q is {total[0]} in total_scores (Q, N) and {utility[1]} in utility (S, Q)")
    flipped = [name for name in shapes if _fit({**shapes, name: shapes[name][::-1]})]
    hint = f". {flipped[0]} looks transposed: pass {flipped[0]}.T" if flipped else ""
    raise UndeError(f"the shapes do not fit together: {'; '.join(wrong)}{hint}")


def _fit(shapes: dict[str, tuple[int, ...]]) -> bool:
    (queries, examples), masks, utility = shapes["total_scores"], shapes["masks"], shapes["utility"]
    return masks[1] == examples and utility == (masks[0], queries)


def predict(total: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Σ of each query's scores over each subset, in float64, some queries at a time."""
    members = masks.T.astype(np.float64)  # (N, S)
    step = max(1, _BLOCK_BYTES // (8 * total.shape[1]))
    predicted = np.empty((masks.shape[0], total.shape[0]))  # (S, Q)
    for start in range(0, len(total), step):
        block = total[start : start + step].astype(np.float64)  # (≤ step, N)
        if not np.isfinite(block).all():
            finite(total, "total_scores", ("query", "training example"), "find out where the scores broke")
        predicted[:, start : start + step] = (block @ members).T
    return predicted


def _spearman(predicted: np.ndarray, actual: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(S, Q), (S, Q) → (Q, B): ρ of each query when subset s occurs counts[b, s] times."""
    rho = np.empty((actual.shape[1], len(counts)))
    for q in range(actual.shape[1]):
        x, y = _ranks(predicted[:, q], counts), _ranks(actual[:, q], counts)  # (B, S), centred
        weighted = counts * x
        xy, xx, yy = (weighted * y).sum(1), (weighted * x).sum(1), (counts * y * y).sum(1)  # (B,)
        defined = np.divide(xy, np.sqrt(xx * yy), out=np.zeros_like(xy), where=(xx > 0) & (yy > 0))
        rho[q] = np.where(yy > 0, defined, np.nan)  # ranks of constants vanish exactly
    return rho


def _ranks(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Average ranks of (S,) values, less their mean, when value s occurs counts[b, s] times: (B, S).

    A value's average rank is the number of values below it and half of those equal to it: differences of the running
    total of counts in sorted order, so one sort serves all B.
    """
    order = np.argsort(values, kind="stable")
    below, upto = (np.searchsorted(values, values, side, sorter=order) for side in ("left", "right"))
    running = np.zeros((len(counts), len(values) + 1))
    np.cumsum(counts[:, order], axis=1, out=running[:, 1:])
    return (running[:, below] + running[:, upto] - len(values)) / 2


def _bootstrap(predicted: np.ndarray, actual: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """The mean ρ over queries, for each of `draws` resamplings of the subsets."""
    subsets = len(actual)
    if draws < 2:
        raise UndeError(f"bootstrap={draws}: pass 0 for none, or the number of draws, such as 1000")
    if subsets < FEWEST_SUBSETS_TO_RESAMPLE:
        raise UndeError(
            f"{subsets} subsets are too few to resample: bootstrap needs at least "
            f"{FEWEST_SUBSETS_TO_RESAMPLE}. Retrain on more subsets, or pass bootstrap=0"
        )
    counts = np.random.default_rng(seed).multinomial(subsets, np.full(subsets, 1 / subsets), size=draws)
    rho = _spearman(predicted, actual, counts.astype(np.float64))  # (Q, B)
    defined = ~np.isnan(rho)
    with np.errstate(invalid="ignore"):  # 0/0 in a draw that leaves no query defined
        return np.where(defined, rho, 0).sum(0) / defined.sum(0)  # (B,)


def recall_at_k(top_indices: Array, relevant: Array) -> Estimate:
    """Compute the fraction of each query's k top-ranked training examples that are relevant to it.

    As in the paper, hits are divided by k, not by the number of contributors.

    Args:
        top_indices: (Q, k) positions in the training data, such as `scores.top(k).indices`.
        relevant: (Q, N) bool, the true contributors of each query. A query without any scores 0.

    Returns:
        The recall of each query, and its mean.

    Raises:
        UndeError: Shapes do not fit, or positions are out of range or repeated.

    Example:
        >>> relevant = np.array([[True, True, False, False], [False, False, False, True]])
        >>> recall_at_k(np.array([[0, 1], [2, 3]]), relevant).per_query
        array([1. , 0.5])
    """
    truth = booleans(relevant, "relevant", "(Q, N)")
    top = top_positions(top_indices, *truth.shape)
    return Estimate(np.take_along_axis(truth, top, axis=1).mean(axis=1))


def rank(total_scores: Array, k: int, excluded: Array | None = None) -> np.ndarray:
    """(Q, k) positions of the k highest of each query's scores (Q, N), best first; of equal ones the earlier.

    Training examples that `excluded` (N,) marks are no candidates.

    >>> rank(np.array([[0.1, 0.7, 0.7, 0.3]]), 3, excluded=np.array([False, False, False, True]))
    array([[1, 2, 0]])
    """
    total = numbers(total_scores, "total_scores", "(Q, N)")
    finite(total, "total_scores", ("query", "training example"), "find out where the scores broke")
    candidates = np.arange(total.shape[1])
    if excluded is not None:
        candidates = np.flatnonzero(~booleans(excluded, "excluded", "(N,)"))
    if not 1 <= k <= len(candidates):
        raise UndeError(f"k is {k}: expected 1 to {len(candidates)}, the number of training examples")
    order = np.argsort(-total[:, candidates].astype(np.float64), axis=1, kind="stable")
    return candidates[order[:, :k]]


def check_contributors(relevant: Mapping[str, Array], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """The (Q, N) marks of each attribute, checked against the shape of scores."""
    if not isinstance(relevant, Mapping) or not relevant:
        what = "empty" if isinstance(relevant, Mapping) else f"a {type(relevant).__name__}"
        raise UndeError(
            f"relevant is {what}: expected {{attribute: (Q, N) marks}}, such as {{'style': marks}}"
        )
    truth = {a: booleans(m, f"relevant[{a!r}]", "(Q, N)") for a, m in relevant.items()}
    for attribute, marks in truth.items():
        if marks.shape != tuple(shape):
            raise UndeError(
                f"relevant[{attribute!r}] has shape {marks.shape}: expected {tuple(shape)}, as the scores have"
            )
        if not marks.any():
            raise UndeError(
                f"relevant[{attribute!r}] marks no contributor of any query: leave out an attribute that these "
                "queries do not name"
            )
    return truth


def skipped_examples(scores: Any) -> np.ndarray | None:
    """(N,) training examples that an index left out; None for scores that do not come from one."""
    train = getattr(scores, "train", None)
    return None if train is None else train.skipped().numpy()


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
    return share_below(scores[flags], scores[~flags]), 1 - share_below(scores[~flags], scores[flags])


def share_below(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """For each value, the share of the others that are smaller, equal ones counted half."""
    ordered = np.sort(others)
    smaller, upto = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return (smaller + upto) / (2 * len(others))
