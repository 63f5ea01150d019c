"""Recall@k: the share of the top-ranked training examples that are known contributors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from unde.errors import UndeError
from unde.evaluate.arrays import Array, booleans, finite, numbers, top_positions
from unde.evaluate.estimate import Estimate


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
