"""K = I: TracIn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unde.kernels.base import Moments, Needs, Round, Settled, Sizes, Source, read


@dataclass(frozen=True)
class Identity:
    fisher: str = "empirical"

    def on(self, sizes: Sizes) -> Settled:
        return _Identity(sizes)


@dataclass(frozen=True)
class _Identity:
    sizes: Sizes
    key: str = "identity"

    @property
    def blocks(self) -> Sequence[Sequence[slice]]:
        return [[p.columns] for p in self.sizes.parts]

    @property
    def rounds(self) -> Sequence[Round]:
        return ()

    def fit(self, moments: Moments, source: Source) -> _Fitted:
        return _Fitted(source)

    def needs(self) -> Needs:
        return Needs()

    def check(self, memory: int) -> None:
        pass


@dataclass(frozen=True)
class _Fitted:
    source: Source

    def apply(self, rows: Tensor) -> Tensor:
        return rows

    def train(self, blocks: Sequence[int]) -> Tensor:
        return read(self.source, blocks)
