"""The training side of scores: features of training examples, read in blocks, and the kernel they are scored with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unde.devices import CPU, put
from unde.errors import UndeError


class TrainFeatures(ABC):
    """Features of training examples under each checkpoint, and the kernel K that they are scored with.

    Where K is block-diagonal it acts on the query side: blocks are g(n), and `apply_kernel` gives K g(q). Else blocks
    are K g(n), and `apply_kernel` gives g(q). A subclass sets the attributes and defines `block`.

    Attributes:
        units: Names of the parameters.
        columns: Columns of each parameter.
        checkpoint_weights: η_c of each checkpoint.
        cuts: Training examples of each block, in order.
        ids: The users' names of the training examples.
        kernel_blocks: Columns that K mixes with one another, where it acts on the query side; else None.
        device: Where blocks are, and scores are computed.
        block_memory: Bytes that scores may take there; None for the memory budget.
    """

    units: Sequence[str]
    columns: Sequence[slice]
    checkpoint_weights: Sequence[float]
    cuts: Sequence[slice]
    ids: Sequence[Any] | None = None
    kernel_blocks: Sequence[Sequence[slice]] | None = None
    device: torch.device = CPU
    block_memory: int | None = None

    @property
    def examples(self) -> int:
        """N, the number of training examples."""
        return self.cuts[-1].stop

    @abstractmethod
    def block(self, s: int) -> list[Tensor]:
        """Features (n, D) of the training examples cuts[s], under each checkpoint."""

    def blocks(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """(training examples, their features), block by block."""
        return ((rows, self.block(s)) for s, rows in enumerate(self.cuts))

    def runs(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """As `blocks`, perhaps in smaller parts, each of which overwrites the one before."""
        return self.blocks()

    def rows(self, which: Tensor) -> list[Tensor]:
        """Features (n, D) of the training examples `which`, in ascending order, under each checkpoint."""
        parts = [self.block_rows(s, local) for s, local in locate(which, self.cuts)]
        return [torch.cat(part) for part in zip(*parts)]

    def block_rows(self, s: int, local: Tensor) -> list[Tensor]:
        """Some rows of a block, by their position in it."""
        local = put(local, self.device)
        return [part.index_select(0, local) for part in self.block(s)]

    def apply_kernel(self, checkpoint: int, queries: Tensor) -> Tensor:
        """What blocks of a checkpoint are multiplied with, of query features (n, D)."""
        return queries

    def squared_norms(self) -> Tensor:
        """(N, U) squared norms of the features of each parameter, summed over checkpoints with η."""
        return torch.cat([self._squared_norms(block) for _, block in self.blocks()])

    def _squared_norms(self, block: Sequence[Tensor]) -> Tensor:
        parts = zip(self.checkpoint_weights, block)
        return torch.stack(
            [eta * torch.stack([b[:, c].square().sum(1) for c in self.columns], 1) for eta, b in parts]
        ).sum(0)

    def skipped(self) -> Tensor:
        """(N,) bool: training examples that were left out."""
        return torch.zeros(self.examples, dtype=torch.bool)

    def leverage(self) -> Tensor:
        """(N,) ⟨g(n), K g(n)⟩, summed over checkpoints with η."""
        raise UndeError("these features have no leverages: score through an Index")

    def extra_values(self) -> Tensor:
        """(N, ·) further measures that the method keeps of each example."""
        raise UndeError("these features come without further measures: score through an Index")

    def find(self, digests: Sequence[str]) -> list[int]:
        """Positions of the digests that are those of training examples."""
        return []


class SelectedFeatures(TrainFeatures):
    """Some training examples of others, in ascending order; no other rows are read."""

    def __init__(self, features: TrainFeatures, which: Tensor) -> None:
        self.features, self.which = features, which
        self.units, self.columns = features.units, features.columns
        self.checkpoint_weights, self.kernel_blocks = features.checkpoint_weights, features.kernel_blocks
        self.device, self.block_memory = features.device, features.block_memory
        self.ids = None if features.ids is None else [features.ids[i] for i in which.tolist()]
        self._parts = locate(which, features.cuts)
        ends = torch.tensor([len(local) for _, local in self._parts]).cumsum(0).tolist()
        self.cuts = [slice(a, b) for a, b in zip([0, *ends], ends)]

    def block(self, s: int) -> list[Tensor]:
        return self.features.block_rows(*self._parts[s])

    def apply_kernel(self, checkpoint: int, queries: Tensor) -> Tensor:
        return self.features.apply_kernel(checkpoint, queries)

    def squared_norms(self) -> Tensor:
        return self.features.squared_norms()[self.which]

    def skipped(self) -> Tensor:
        return self.features.skipped()[self.which]

    def leverage(self) -> Tensor:
        return self.features.leverage()[self.which]

    def extra_values(self) -> Tensor:
        return self.features.extra_values()[self.which]

    def find(self, digests: Sequence[str]) -> list[int]:
        return self.features.find(digests)


def locate(which: Tensor, cuts: Sequence[slice]) -> list[tuple[int, Tensor]]:
    """(block, positions in it) of ascending rows `which`, for the blocks that hold one.

    >>> locate(torch.tensor([1, 4, 5]), [slice(0, 2), slice(2, 4), slice(4, 9)])
    [(0, tensor([1])), (2, tensor([0, 1]))]
    """
    bounds = torch.searchsorted(which, torch.tensor([[rows.start, rows.stop] for rows in cuts])).tolist()
    return [(s, which[a:b] - cuts[s].start) for s, (a, b) in enumerate(bounds) if a < b]
