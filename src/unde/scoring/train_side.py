"""The training side of scores: what of an index they are made with, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.store.dequantize import Block


def _unknown() -> Tensor:
    raise UndeError("this training side knows neither leverages nor residuals: score through an Index")


def _none(digests: Sequence[str]) -> list[int]:
    return []


def _as_is(checkpoint: int, rows: Tensor) -> Tensor:
    return rows


@dataclass(frozen=True)
class TrainSide:
    """What scores need to know of the training side of an index."""

    examples: int
    units: Sequence[str]
    columns: Sequence[slice]  # of each unit
    checkpoint_weights: Sequence[float]  # η_c
    cuts: Sequence[slice]  # the rows of each block
    block: Callable[[int], list[Tensor]]  # of the rows cuts[s], (n, D) for each checkpoint: K g(n), or g(n)
    squares: Callable[[], Tensor]  # (N, U): squared norms of the features, summed over checkpoints with η
    skipped: Callable[[], Tensor]  # (N,) bool
    ids: Sequence[Any] | None
    leverage: Callable[[], Tensor] = _unknown  # (N,): ⟨g(n), K g(n)⟩
    beside: Callable[[], Tensor] = _unknown  # (N, ·): what the method keeps beside features
    on_queries: Callable[[int, Tensor], Tensor] = _as_is  # K of a checkpoint on (n, D), where blocks are g(n)
    mixes: Sequence[Sequence[slice]] | None = None  # columns that `on_queries` mixes among themselves
    some: range | None = None  # the blocks that are looked at; None: all
    packed: Callable[[int], Sequence[Block]] | None = (
        None  # a block to be multiplied, perhaps as it is stored
    )
    rows: Callable[[int, Tensor], list[Tensor]] | None = None  # some rows of a block, by their number in it
    holding: Callable[[Sequence[str]], list[int]] = _none  # which of some digests are of training examples

    def blocks(self) -> Iterator[tuple[slice, list[Tensor]]]:
        return ((self.cuts[s], self.block(s)) for s in self.some or range(len(self.cuts)))

    def packed_blocks(self) -> Iterator[tuple[slice, Sequence[Block]]]:
        """The same to be multiplied, once."""
        read = self.packed or self.block
        return ((self.cuts[s], read(s)) for s in self.some or range(len(self.cuts)))

    def only(self, where: Tensor) -> TrainSide:
        """The same of some training examples, in ascending order; of blocks no other rows are read."""
        cuts, pieces, start = list[slice](), list[tuple[int, Tensor]](), 0
        for s, rows in enumerate(self.cuts):
            low, high = torch.searchsorted(where, torch.tensor([rows.start, rows.stop])).tolist()
            if low < high:
                pieces.append((s, where[low:high] - rows.start))
                cuts.append(slice(start, start + high - low))
                start += high - low

        def block(i: int) -> list[Tensor]:
            s, local = pieces[i]
            if self.rows is not None:
                return self.rows(s, local)
            return [part.index_select(0, local) for part in self.block(s)]

        return replace(
            self,
            examples=len(where),
            cuts=cuts,
            block=block,
            squares=lambda: self.squares()[where],
            leverage=lambda: self.leverage()[where],
            beside=lambda: self.beside()[where],
            skipped=lambda: self.skipped()[where],
            ids=None if self.ids is None else [self.ids[i] for i in where.tolist()],
            packed=None,
            rows=None,
            some=None,
        )
