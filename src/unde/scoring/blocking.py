"""Columns of features as runs, and blocks of queries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def cut(queries: slice, step: int) -> Iterator[slice]:
    return (slice(a, min(a + step, queries.stop)) for a in range(queries.start, queries.stop, step))


def start_of(run: tuple[int, slice]) -> int:
    return run[1].start


def joined(runs: Iterable[tuple[int, slice]]) -> list[tuple[int, slice]]:
    """Neighbouring columns of one group as one run."""
    out: list[tuple[int, slice]] = []
    for j, c in runs:
        if out and out[-1][0] == j and out[-1][1].stop == c.start:
            out[-1] = (j, slice(out[-1][1].start, c.stop))
        else:
            out.append((j, c))
    return out


class Batch(NamedTuple):
    """Neighbouring groups, of as many neighbouring columns each."""

    groups: slice
    columns: slice
    more: bool  # whether these groups have had other columns before


def batches(runs: Iterable[tuple[int, slice]], seen: set[int] | None = None) -> list[Batch]:
    """Runs in their order, those that are alike and follow one another as one; `seen` are groups that had columns.

    >>> [(b.groups, b.columns) for b in batches([(0, slice(0, 4)), (1, slice(4, 8)), (2, slice(8, 9))])]
    [(slice(0, 2, None), slice(0, 8, None)), (slice(2, 3, None), slice(8, 9, None))]
    """
    seen, out, width = set() if seen is None else seen, list[Batch](), 0
    for j, c in runs:
        if c.start == c.stop:
            continue
        last, more = out[-1] if out else None, j in seen
        alike = last is not None and (last.groups.stop, last.columns.stop, last.more) == (j, c.start, more)
        if last is not None and alike and c.stop - c.start == width:
            out[-1] = Batch(slice(last.groups.start, j + 1), slice(last.columns.start, c.stop), more)
        else:
            out.append(Batch(slice(j, j + 1), c, more))
        width = c.stop - c.start
        seen.add(j)
    return out


def mask(columns: Sequence[slice], width: int) -> Tensor:
    out = torch.zeros(width)
    for c in columns:
        out[c] = 1
    return out
