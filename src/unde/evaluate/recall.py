"""Recall@k: how many of the top-ranked training examples are known contributors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from unde.errors import UndeError
from unde.evaluate.arrays import Array, booleans, finite, numbers
from unde.evaluate.estimate import Estimate


def recall_at_k(top_indices: Array, relevant: Array) -> Estimate:
    """The fraction of each query's k top-ranked training examples that are relevant to it.

    `top_indices` (Q, k) are positions in the training data, `relevant` (Q, N) marks the true contributors of
    each query. As in the paper, hits are divided by k, not by the number of contributors; k is the width of
    `top_indices`. A query with no contributor scores 0.

    >>> relevant = np.array([[True, True, False, False], [False, False, False, True]])
    >>> recall_at_k(np.array([[0, 1], [2, 3]]), relevant).per_query
    array([1. , 0.5])
    """
    top = numbers(top_indices, "top_indices", "(Q, k)")
    truth = booleans(relevant, "relevant", "(Q, N)")
    if top.dtype.kind not in "iu":
        raise UndeError(f"top_indices must hold whole numbers, not {top.dtype}: pass positions, not scores")
    if len(top) != len(truth):
        raise UndeError(
            f"Q is {len(top)} in top_indices (Q, k) and {len(truth)} in relevant (Q, N): "
            "both need one row for each query"
        )
    outside = np.argwhere((top < 0) | (top >= truth.shape[1]))
    if len(outside):
        q, rank = outside[0]
        raise UndeError(
            f"top_indices[{q}, {rank}] is {top[q, rank]}, but relevant (Q, N) has N = {truth.shape[1]} "
            "training examples: positions run from 0 to N − 1"
        )
    repeated = (np.diff(np.sort(top, axis=1), axis=1) == 0).any(axis=1)  # (Q,)
    if repeated.any():
        raise UndeError(
            f"top_indices names a training example twice for query {int(np.argmax(repeated))}: "
            "a hit must count once"
        )
    return Estimate(np.take_along_axis(truth, top.astype(np.int64), axis=1).mean(axis=1))


def ranked(total_scores: Array, k: int, without: Array | None = None) -> np.ndarray:
    """(Q, k) positions of the k highest of each query's scores (Q, N), best first; of equal ones the earlier.

    Training examples that `without` (N,) marks are not candidates.

    >>> ranked(np.array([[0.1, 0.7, 0.7, 0.3]]), 3, without=np.array([False, False, False, True]))
    array([[1, 2, 0]])
    """
    total = numbers(total_scores, "total_scores", "(Q, N)")
    finite(total, "total_scores", ("query", "training example"), "find out where the scores broke")
    candidates = np.arange(total.shape[1])
    if without is not None:
        candidates = np.flatnonzero(~booleans(without, "without", "(N,)"))
    if not 1 <= k <= len(candidates):
        raise UndeError(f"k is {k}: expected 1 to {len(candidates)}, the number of training examples")
    order = np.argsort(-total[:, candidates].astype(np.float64), axis=1, kind="stable")
    return candidates[order[:, :k]]


def contributors(relevant: Mapping[str, Array], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """The (Q, N) marks of each attribute, once they are known to fit scores of this shape."""
    if not isinstance(relevant, Mapping) or not relevant:
        what = "empty" if isinstance(relevant, Mapping) else f"a {type(relevant).__name__}"
        raise UndeError(
            f"relevant is {what}: expected {{attribute: (Q, N) marks}}, such as {{'style': marks}}"
        )
    marks = {a: booleans(m, f"relevant[{a!r}]", "(Q, N)") for a, m in relevant.items()}
    for attribute, found in marks.items():
        if found.shape != tuple(shape):
            raise UndeError(
                f"relevant[{attribute!r}] has shape {found.shape}: expected {tuple(shape)}, as the scores have"
            )
        if not found.any():
            raise UndeError(
                f"relevant[{attribute!r}] marks no contributor of any query: leave out an attribute that these "
                "queries do not name"
            )
    return marks


def skipped(scores: Any) -> np.ndarray | None:
    """(N,) which training examples an index left out; None for scores that do not come from one."""
    train = getattr(scores, "train", None)
    return None if train is None else train.skipped().numpy()
