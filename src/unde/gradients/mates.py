"""Batch mates for a check of independence: examples that are alike, and examples that are not.

A loss may let examples of a batch meet only where they have something in common: a contrastive term pulls equal labels
together and pushes near inputs of other labels apart. A few examples that are spread over the data may never meet, so
the check looks for some that would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from unde.data import Rows, evenly, to_numpy
from unde.gradients.feature_pass import LOOKED_AT, count_numbers

_FIRST = 8  # rows at the beginning, beside those that are spread over the data: sorted data has its classes in a row
_ENTRIES = 512  # numbers of an example that distances are taken from


@dataclass(frozen=True)
class Mates:
    """Positions of examples to try in one batch."""

    largest: int  # the example with the most numbers in it
    triple: list[int]  # an example, the one most like it, and the nearest of those with other labels
    equal: list[int]  # the farthest pair of equal labels, and a third one
    near: list[int]  # the nearest pair of other labels


def find_mates(rows: Rows) -> Mates:
    """Choose them among some rows that are spread over the data; each is read once.

    >>> import torch
    >>> x, y = torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.0, 0.1], [5.0, 9.0], [0.2, 0.0]]), torch.tensor([0, 1, 1, 0, 0])
    >>> find_mates(Rows((x, y))).triple
    [0, 4, 2]
    """
    spread = evenly(len(rows), LOOKED_AT)
    where = sorted({*spread, *range(min(_FIRST, len(rows)))})
    sizes, labels, vectors = [], [], []
    for i in where:
        example = rows[i]
        scalars, arrays = _parts(example)
        sizes.append(count_numbers(example))
        labels.append(scalars)
        vectors.append(_entries(arrays))
    largest = max(spread, key=lambda i: sizes[where.index(i)])
    if len(where) == 1:
        return Mates(largest, [0, 0], [0, 0], [0, 0])
    equal, distance = _equal_labels(labels), _distances(vectors)
    triple = _triple(equal, distance)
    itself = np.eye(len(where), dtype=bool)
    far = _best([itself, -equal, -distance])  # the farthest of equal labels
    near = _best([itself, equal, distance == 0, distance])  # the nearest of other labels
    third = min(
        (i for i in range(len(where)) if i not in far), key=lambda i: -equal[far[0], i], default=far[0]
    )
    batches = [triple, [*far, third], list(near)]
    return Mates(largest, *([where[i] for i in batch] for batch in batches))


def _triple(equal: np.ndarray, distance: np.ndarray) -> list[int]:
    """An example, the nearest with as many equal labels as any pair has, and the nearest with as few as can be."""
    n = len(equal)
    copy = distance == 0  # where some losses are flat
    first, second = _best([np.eye(n, dtype=bool), copy, -equal, distance])
    if equal[first, second] == 0 and equal.any():  # no two of equal labels: a copy has them
        second = first
    others = [i for i in range(n) if i not in (first, second)]
    if not others:
        return [first, second]
    return [first, second, min(others, key=lambda i: (equal[first, i], distance[first, i]))]


def _best(keys: list[np.ndarray]) -> tuple[int, int]:
    """The pair whose keys (n, n), the most important first, are least; of equal ones the first."""
    order = np.lexsort([key.ravel() for key in reversed(keys)])
    first, second = divmod(int(order[0]), len(keys[0]))
    return first, second


def _equal_labels(labels: list[list[Any]]) -> np.ndarray:
    """(n, n) in how many of their scalars two examples are equal; the diagonal tells how many there are."""
    equal = np.zeros((len(labels), len(labels)), dtype=np.int64)
    for column in range(max(map(len, labels))):
        values = [str(row[column]) if column < len(row) else None for row in labels]
        numbers = np.unique([repr(v) for v in values], return_inverse=True)[1]
        equal += numbers[:, None] == numbers[None]
    return equal


def _distances(vectors: list[np.ndarray]) -> np.ndarray:
    """(n, n) distances, of arrays that are cut or padded to equal lengths."""
    width = max(map(len, vectors))
    whole = np.zeros((len(vectors), width), dtype=np.float64)
    for row, vector in zip(whole, vectors):
        row[: len(vector)] = vector
    return np.sqrt(((whole[:, None] - whole[None]) ** 2).sum(-1))


def _entries(arrays: list[np.ndarray]) -> np.ndarray:
    """Some numbers of all arrays of an example, scaled to be of order one."""
    if not arrays:
        return np.zeros(0)
    each = max(1, _ENTRIES // len(arrays))
    some = [a.ravel()[:: max(1, a.size // each)][:each].astype(np.float64) for a in arrays]
    return np.nan_to_num(np.concatenate(some), posinf=0.0, neginf=0.0)


def _parts(value: Any) -> tuple[list[Any], list[np.ndarray]]:
    """The discrete scalars of an example, labels among them, and its arrays."""
    if isinstance(value, (Mapping, list, tuple)):
        plain = not isinstance(value, Mapping) and len(value) > 8  # a list of numbers is an array
        if plain and all(isinstance(v, (int, float)) for v in value):
            return [], [np.asarray(value)]
        inside = [_parts(v) for v in (value.values() if isinstance(value, Mapping) else value)]
        return [s for scalars, _ in inside for s in scalars], [a for _, arrays in inside for a in arrays]
    if isinstance(value, str):
        return [], [np.frombuffer(value.encode(errors="replace"), dtype=np.uint8)]
    if isinstance(value, (bool, int)):
        return [value], []
    if not isinstance(value, (Tensor, np.ndarray, np.generic, float)) and not hasattr(value, "tobytes"):
        return [], []
    array = to_numpy(value)
    if array.dtype.kind in "iub" and array.size == 1:
        return [array.item()], []
    return [], [array] if array.dtype.kind in "iubf" else []
