"""Checked numpy arrays from the tensors, arrays and lists that users pass."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from unde.data import to_numpy
from unde.errors import UndeError

Array: TypeAlias = np.ndarray | torch.Tensor


def numbers(value: Any, name: str, shape: str) -> np.ndarray:
    """Real numbers with as many axes as `shape` names, such as "(S, Q)"."""
    array = to_numpy(value)
    if array.dtype.kind not in "fiub":
        raise UndeError(f"{name} must hold real numbers, not {array.dtype}: pass a {shape} array")
    return _check_axes(array, name, shape)


def booleans(value: Any, name: str, shape: str) -> np.ndarray:
    """True or False, or 0 and 1, with as many axes as `shape` names."""
    array = _check_axes(to_numpy(value), name, shape)
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind not in "fiu" or not np.isin(array, (0, 1)).all():
        raise UndeError(
            f"{name} must hold only True and False (or 0 and 1), one for each entry of {shape}; "
            f"it is {array.dtype} with other values. Turn lists of positions into a mask first"
        )
    return array.astype(bool)


def finite(array: np.ndarray, name: str, axes: tuple[str, ...], cure: str) -> np.ndarray:
    """The array, if all entries are finite; `axes` names what the positions mean."""
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        where = ", ".join(f"{axis} {position}" for axis, position in zip(axes, bad[0]))
        raise UndeError(f"{name} has {len(bad)} NaN or infinite values, the first at {where}: {cure}")
    return array


def top_positions(value: Any, queries: int, examples: int) -> np.ndarray:
    """(Q, k) positions of training examples, each at most once for a query."""
    top = numbers(value, "top_indices", "(Q, k)")
    if top.dtype.kind not in "iu":
        raise UndeError(f"top_indices must hold whole numbers, not {top.dtype}: pass positions, not scores")
    if len(top) != queries:
        raise UndeError(
            f"top_indices (Q, k) has {len(top)} rows for {queries} queries: expected one for each"
        )
    outside = np.argwhere((top < 0) | (top >= examples))
    if len(outside):
        q, rank = outside[0]
        raise UndeError(
            f"top_indices[{q}, {rank}] is {top[q, rank]}: expected positions in the {examples} training examples, "
            f"0 to {examples - 1}. If query {q} has fewer proponents, use a smaller k for all queries"
        )
    repeated = (np.diff(np.sort(top, axis=1), axis=1) == 0).any(axis=1)  # (Q,)
    if repeated.any():
        raise UndeError(
            f"top_indices names a training example twice for query {int(np.argmax(repeated))}: "
            "expected k different examples"
        )
    return top.astype(np.int64)


def _check_axes(array: np.ndarray, name: str, shape: str) -> np.ndarray:
    if array.ndim != shape.count(",") + 1 - shape.count(",)"):
        raise UndeError(f"{name} must have shape {shape}, but has shape {array.shape}")
    if array.size == 0:
        raise UndeError(f"{name} is empty: it has shape {array.shape}, expected {shape}")
    return array
