"""Turning what users hand in (tensors, arrays, lists) into checked numpy arrays."""

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
    return _with_axes(array, name, shape)


def booleans(value: Any, name: str, shape: str) -> np.ndarray:
    """True or False, also when spelled 0 and 1, with as many axes as `shape` names."""
    array = _with_axes(to_numpy(value), name, shape)
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind not in "fiu" or not np.isin(array, (0, 1)).all():
        raise UndeError(
            f"{name} must hold only True and False (or 0 and 1), one for each entry of {shape}; "
            f"it is {array.dtype} with other values. Turn lists of positions into a mask first"
        )
    return array.astype(bool)


def finite(array: np.ndarray, name: str, axes: tuple[str, ...], cure: str) -> np.ndarray:
    """The array itself, once every entry is known to be finite; `axes` names what the positions mean."""
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        where = ", ".join(f"{axis} {position}" for axis, position in zip(axes, bad[0]))
        raise UndeError(f"{name} has {len(bad)} NaN or infinite values, the first at {where}: {cure}")
    return array


def _with_axes(array: np.ndarray, name: str, shape: str) -> np.ndarray:
    if array.ndim != shape.count(",") + 1 - shape.count(",)"):
        raise UndeError(f"{name} must have shape {shape}, but has shape {array.shape}")
    if array.size == 0:
        raise UndeError(f"{name} is empty: it has shape {array.shape}, expected {shape}")
    return array
