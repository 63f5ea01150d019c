"""Rows as they are stored, to be multiplied: they are unpacked a few at a time, and never all at once.

To write all that a shard unpacks to, and to read it again, takes longer than to read it in float32. So rows are
unpacked into the same memory, a run of them after the other, and multiplied while they are in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unde.store.codec import Codec

EACH = 2**23  # bytes of each thread that are unpacked together: of fewer, threads wait too often
MOST = 2**24  # of all threads: more are not in the cache any more when they are multiplied
_FEWEST = 64  # rows: products with fewer are slow


@dataclass(frozen=True, eq=False)
class Packed:
    """Some rows of a shard, as its codec has packed them."""

    codec: Codec
    columns: Sequence[slice]
    shard: Mapping[str, Tensor]  # what of it the codec has made

    def __len__(self) -> int:
        return len(self.shard["features"])

    def __getitem__(self, rows: slice) -> Packed:
        return replace(self, shard={name: stored[rows] for name, stored in self.shard.items()})


Block = Tensor | Packed


def in_runs(block: Block) -> Iterator[tuple[slice, Tensor]]:
    """(rows, (n, D) float32), to be multiplied: the next run overwrites it."""
    if isinstance(block, Tensor):
        yield slice(0, len(block)), block
        return
    width = block.columns[-1].stop
    step = min(len(block), at_once(width))
    out = torch.empty(step, width)
    for start in range(0, len(block), step or 1):
        rows = slice(start, min(start + step, len(block)))
        yield rows, block.codec.unpack(block[rows].shard, block.columns, out[: rows.stop - rows.start])


def at_once(width: int) -> int:
    """Rows that are unpacked together. By the number of threads alone, and as a whole shard is aligned, so that scores
    do not depend on who makes them, or in how much memory (those of int8: up to rounding, `limbs.py`)."""
    return max(_FEWEST, min(EACH * torch.get_num_threads(), MOST) // (4 * width) // 16 * 16)
