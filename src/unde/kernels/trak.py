"""The empirical kernel of TRAK, K = (ΦᵀΦ + λI)⁻¹ (Eq. 2), in two equal forms for N examples and D features:

primal   Φ (ΦᵀΦ + λI)⁻¹       a D × D inverse
dual     (ΦΦᵀ + λI)⁻¹ Φ       an N × N inverse

Layer by layer it is the kernel of LoGRA (`logra`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unde.devices import put
from unde.errors import UndeError
from unde.kernels import precision as numbers
from unde.kernels.base import (
    BoundKernel,
    FeatureLayout,
    Fitted,
    KernelSource,
    Moments,
    Needs,
    Round,
    chunks,
    meta_tensor,
    read,
)
from unde.kernels.logra import LayerBlocks

SMALL = 128  # rows of a kernel up to which all is done in float64, since it costs nothing


@dataclass(frozen=True)
class Gram:
    """`form` is "primal", "dual" or "auto", the smaller; `blocks` is "full", or "layer" as LoGRA has it.
    `damping_scope` is what relative damping of layers is a multiple of: the mean diagonal of each "layer", or of the
    whole "model"."""

    damping: float
    relative: bool = True
    form: str = "auto"
    blocks: str = "full"
    fisher: str = "empirical"
    damping_scope: str = "layer"

    def bind(self, sizes: FeatureLayout) -> BoundKernel:
        if self.blocks == "layer":
            return LayerBlocks(sizes, self.damping, self.relative, self.damping_scope)
        primal = self.form == "primal" or (self.form == "auto" and sizes.width <= sizes.examples)
        return (Primal if primal else Dual)(sizes, self.damping, self.relative)


@dataclass(frozen=True)
class _FullGram(BoundKernel, ABC):
    shape: ClassVar[str]  # of what is inverted, in words
    sizes: FeatureLayout
    damping: float
    relative: bool

    @property
    def blocks(self) -> Sequence[Sequence[slice]] | None:
        """All columns are mixed: of what is stored, unless K g(n) cannot be."""
        return [[slice(0, self.sizes.width)]] if self.sizes.lossy else None

    @property
    @abstractmethod
    def side(self) -> int:
        """Rows of what is inverted."""

    @property
    def precision(self) -> torch.dtype:
        """Of products, known beforehand: with relative damping ‖ΦᵀΦ‖/λ is at most D/damping."""
        comfortable = self.relative and self.sizes.width <= numbers.ILL * self.damping and self.side > SMALL
        return self.sizes.dtype if comfortable else torch.float64

    @property
    def key(self) -> str:
        return f"{type(self).__name__.lower()} {self.precision}".replace("torch.", "")

    @property
    def described(self) -> str:
        return f"the {self.shape} kernel ({self.side:,} × {self.side:,}) needs"

    def inverse(self, gram: Tensor, device: torch.device) -> tuple[Tensor, float]:
        """(gram + λI)⁻¹ for a device, made in the memory of one matrix, and λ. `gram` is spent."""
        [measured] = numbers.measure([gram])
        damped = numbers.damp(
            self.side, measured, self.damping, self.relative, self.sizes.width, self.sizes.rounding
        )
        damped.check(*damped.invert(gram).tolist())
        return numbers.cast_if_in_range(gram, self.precision, device), damped.lam

    def needs(self) -> Needs:
        """The matrix as it is read and its inverse, in float64."""
        return Needs(16 * self.side**2, {"gram": meta_tensor(self.side, self.side)})


@dataclass(frozen=True)
class Primal(_FullGram):
    shape: ClassVar[str] = "D × D"

    @property
    def side(self) -> int:
        return self.sizes.width

    @property
    def rounds(self) -> Sequence[Round]:
        return [Round("gram", len(self.sizes.runs()), self._job)]

    def _job(self, source: KernelSource, i: int, before: Moments) -> Moments:
        """ΦᵀΦ of a run of blocks: products in `precision`, summed in float64."""
        gram = numbers.zeros(self.side, self.side, device=source.device)
        for phi in chunks(source, self.sizes.runs()[i]):
            phi = put(phi, source.device, self.precision)
            gram += numbers.product(phi.T, phi).to(gram.device)
            del phi  # before the next is read
        return {"gram": gram}

    def fit(self, moments: Moments, source: KernelSource) -> Fitted:
        return FittedPrimal(source, self.inverse(moments["gram"].clone(), source.device)[0])


@dataclass(frozen=True)
class FittedPrimal(Fitted):
    inverse: Tensor

    def apply(self, rows: Tensor) -> Tensor:
        return numbers.round_to(rows.to(self.inverse) @ self.inverse, rows)


@dataclass(frozen=True)
class Dual(_FullGram):
    shape: ClassVar[str] = "N × N"

    @property
    def side(self) -> int:
        return self.sizes.examples

    @property
    def rounds(self) -> Sequence[Round]:
        return [Round("panels", len(self.sizes.joined()), self._job, self._assemble)]

    def _job(self, source: KernelSource, i: int, before: Moments) -> Moments:
        """ΦΦᵀ of joined blocks with all rows up to theirs: products in `precision`."""
        joined = self.sizes.joined()
        phi = self._read(source, joined[i])
        panel = [numbers.product(phi, self._read(source, b).T) for b in joined[:i]]
        return {f"panel {i:06d}": torch.cat([*panel, numbers.product(phi, phi.T)], 1)}

    def _read(self, source: KernelSource, blocks: Sequence[int]) -> Tensor:
        return put(read(source, blocks), source.device, self.precision)

    def _assemble(self, panels: Moments) -> Moments:
        return {"gram": numbers.assemble([panels[name] for name in sorted(panels)])}

    def fit(self, moments: Moments, source: KernelSource) -> Fitted:
        return FittedDual(source, *self.inverse(moments["gram"].clone(), source.device))


@dataclass(frozen=True)
class FittedDual(Fitted):
    inverse: Tensor
    lam: float

    def train(self, blocks: Sequence[int]) -> Tensor:
        """(ΦΦᵀ + λI)⁻¹ Φ"""
        return self._combine(self.inverse[self.source.sizes.rows(blocks)])

    def combine(self, coefficients: Tensor) -> Tensor:
        """Coefficients (S, N) times K g(n), in one pass and without the cancellation of `apply`."""
        return self._combine(coefficients.to(self.inverse) @ self.inverse)

    def _combine(self, mixed: Tensor) -> Tensor:
        """(S, N) times Φ."""
        sizes = self.source.sizes
        total = mixed.new_zeros(len(mixed), sizes.width)
        for s, here in enumerate(sizes.cuts):
            total.addmm_(mixed[:, here], self.source.block(s).to(mixed))
        return numbers.round_to(total, torch.empty(0, dtype=sizes.dtype, device=self.source.device))

    def apply(self, rows: Tensor) -> Tensor:
        """A (ΦᵀΦ + λI)⁻¹ = (A − A Φᵀ (ΦΦᵀ + λI)⁻¹ Φ) / λ for rows A that are not those of Φ."""
        if self.lam == 0:
            raise UndeError("without damping the dual form has no inverse for other rows: raise the damping")
        a, cuts, double = numbers.double(rows), self.source.sizes.cuts, numbers.double
        products = torch.cat([a @ double(self.source.block(s)).T for s in range(len(cuts))], 1)  # (n, N)
        solved, out = products @ double(self.inverse), a
        for s, here in enumerate(cuts):
            out = out - solved[:, here] @ double(self.source.block(s))
        return numbers.round_to(out / self.lam, rows)
