"""Columns of features as runs, and blocks of queries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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


def mask(columns: Sequence[slice], width: int) -> Tensor:
    out = torch.zeros(width)
    for c in columns:
        out[c] = 1
    return out
