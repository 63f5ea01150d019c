"""What kernels work on: the features in blocks of rows, and the parameters whose columns they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Block = tuple[slice, Callable[[], Tensor]]  # consecutive rows of Φ, and how to read them: (n, D)


@dataclass(frozen=True)
class Part:
    """The columns of one parameter. `factors` are the covariances of its two sides, (r, r) and (c, c), where
    its feature is a matrix of r × c that is a sum of outer products."""

    name: str
    columns: slice
    factors: tuple[Tensor, Tensor] | None = None

    @property
    def layer(self) -> str:
        """The module that holds the parameter: weight and bias of one layer make one block."""
        return self.name.rpartition(".")[0] or self.name


class Kernel(Protocol):
    """K, fitted on features and applied to the training side in blocks."""

    def apply(
        self,
        blocks: Sequence[Block],
        parts: Sequence[Part],
        memory: int,
        fit: Sequence[Block] | None = None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Φ K in the blocks of Φ, one after the other, in the precision of Φ; K is made of `fit` if given."""


def width(parts: Sequence[Part]) -> int:
    return parts[-1].columns.stop
