"""Recall@k: how many of the top-ranked training examples are known contributors."""

from __future__ import annotations

import numpy as np

from whence.errors import WhenceError
from whence.evaluate._arrays import Array, booleans, numbers
from whence.evaluate.estimate import Estimate


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
        raise WhenceError(f"top_indices must hold whole numbers, not {top.dtype}: pass positions, not scores")
    if len(top) != len(truth):
        raise WhenceError(
            f"Q is {len(top)} in top_indices (Q, k) and {len(truth)} in relevant (Q, N): "
            "both need one row for each query"
        )
    outside = np.argwhere((top < 0) | (top >= truth.shape[1]))
    if len(outside):
        q, rank = outside[0]
        raise WhenceError(
            f"top_indices[{q}, {rank}] is {top[q, rank]}, but relevant (Q, N) has N = {truth.shape[1]} "
            "training examples: positions run from 0 to N − 1"
        )
    repeated = (np.diff(np.sort(top, axis=1), axis=1) == 0).any(axis=1)  # (Q,)
    if repeated.any():
        raise WhenceError(
            f"top_indices names a training example twice for query {int(np.argmax(repeated))}: "
            "a hit must count once"
        )
    return Estimate(np.take_along_axis(truth, top.astype(np.int64), axis=1).mean(axis=1))
