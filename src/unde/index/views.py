"""Data made of other data: without some examples, or several sets one after the other."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from unde.data import Rows
from unde.fingerprints import to_signed


class Picked:
    """Some examples of a data set, in an order of their own."""

    def __init__(self, rows: Rows, where: Tensor) -> None:
        self.rows, self.where = rows, where

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, i: int) -> Any:
        return self.rows[int(self.where[i])]


class Joined:
    """One data set after the other.

    >>> list(Joined(Rows(["a", "b"]), Rows(["c"])))
    ['a', 'b', 'c']
    """

    def __init__(self, *parts: Rows) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, i: int) -> Any:
        for part in self.parts:
            if i < len(part):
                return part[i]
            i -= len(part)
        raise IndexError(i)


def aligned(rows: Rows, digests: Tensor) -> tuple[Rows | None, int]:
    """The examples that have these digests, one after the other; or None, and how many of them are not there.

    For data from which examples were not removed, as they were from an index, or that stands in another order.
    """
    places: dict[int, list[int]] = defaultdict(list)
    for i in reversed(range(len(rows))):
        places[to_signed(rows.digests([i])[0])].append(i)
    where = [
        found[-1] if len(found) == 1 else found.pop() for found in map(places.get, digests.tolist()) if found
    ]
    if len(where) < len(digests):
        return None, len(digests) - len(where)
    return Rows(Picked(rows, torch.tensor(where)), rows.collate), 0
