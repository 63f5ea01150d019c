"""The empirical kernel of TRAK, K = (ΦᵀΦ + λI)⁻¹ (Eq. 2), in two equal forms for N examples and D features:

primal   Φ (ΦᵀΦ + λI)⁻¹       a D × D inverse
dual     (ΦΦᵀ + λI)⁻¹ Φ       an N × N inverse
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.kernels import precision as numbers
from unde.kernels.base import (
    Moments,
    Needs,
    Round,
    Sizes,
    Source,
    chunks,
    damped,
    meta_tensor,
    read,
)

# ‖ΦᵀΦ‖/λ above which all is done in float64: rounding to float32 would be like another λ, 1 % off.
ILL = 1e5
SMALL = 128  # rows of a kernel up to which all is done in float64, since it costs nothing

# A_ii (A⁻¹)_ii is one over the part of column i that the others do not explain, whatever its units. Where they
# explain all of it, rounding leaves 1e13 or more.
_SINGULAR = 1e12


@dataclass(frozen=True)
class _Full(ABC):
    shape: ClassVar[str]  # of what is inverted, in words
    damping: float
    relative: bool
    sizes: Sizes

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
        comfortable = self.relative and self.sizes.width <= ILL * self.damping and self.side > SMALL
        return self.sizes.dtype if comfortable else torch.float64

    @property
    def key(self) -> str:
        return f"{type(self).__name__.lower()} {self.precision}".replace("torch.", "")

    def check(self, memory: int) -> None:
        self.needs().check(memory, f"the {self.shape} kernel ({self.side:,} × {self.side:,}) needs")

    def inverse(self, gram: Tensor) -> tuple[Tensor, float]:
        """(gram + λI)⁻¹, made in the memory of one matrix, and λ. `gram` is spent."""
        made, lam = inverse(gram, self.damping, self.relative, self.sizes.width, self.sizes.rounding)
        return numbers.within(made, self.precision), lam

    def needs(self) -> Needs:
        """The matrix as it is read and its inverse, in float64."""
        return Needs(16 * self.side**2, {"gram": meta_tensor(self.side, self.side)})


@dataclass(frozen=True)
class Primal(_Full):
    shape: ClassVar[str] = "D × D"

    @property
    def side(self) -> int:
        return self.sizes.width

    @property
    def rounds(self) -> Sequence[Round]:
        return [Round("gram", len(self.sizes.runs()), self._job)]

    def _job(self, source: Source, i: int, before: Moments) -> Moments:
        """ΦᵀΦ of a run of blocks: products in `precision`, summed in float64."""
        gram = torch.zeros(self.side, self.side, dtype=torch.float64)
        for phi in chunks(source, self.sizes.runs()[i]):
            phi = phi.to(self.precision)
            gram += numbers.product(phi.T, phi)
            del phi  # before the next is read
        return {"gram": gram}

    def fit(self, moments: Moments, source: Source) -> _PrimalFitted:
        return _PrimalFitted(source, self.inverse(moments["gram"].clone())[0])


@dataclass(frozen=True)
class _PrimalFitted:
    source: Source
    inverse: Tensor

    def apply(self, rows: Tensor) -> Tensor:
        return numbers.rounded(rows.to(self.inverse.dtype) @ self.inverse, rows.dtype)

    def train(self, blocks: Sequence[int]) -> Tensor:
        return self.apply(read(self.source, blocks))


@dataclass(frozen=True)
class Dual(_Full):
    shape: ClassVar[str] = "N × N"

    @property
    def side(self) -> int:
        return self.sizes.examples

    @property
    def rounds(self) -> Sequence[Round]:
        return [Round("panels", len(self.sizes.joined()), self._job, self._assembled)]

    def _job(self, source: Source, i: int, before: Moments) -> Moments:
        """ΦΦᵀ of joined blocks with all rows up to theirs: products in `precision`."""
        joined = self.sizes.joined()
        phi = read(source, joined[i]).to(self.precision)
        panel = [numbers.product(phi, read(source, b).to(self.precision).T) for b in joined[:i]]
        return {f"panel {i:06d}": torch.cat([*panel, numbers.product(phi, phi.T)], 1)}

    def _assembled(self, panels: Moments) -> Moments:
        return {"gram": assembled([panels[name] for name in sorted(panels)])}

    def fit(self, moments: Moments, source: Source) -> _DualFitted:
        return _DualFitted(source, *self.inverse(moments["gram"].clone()))


@dataclass(frozen=True)
class _DualFitted:
    source: Source
    inverse: Tensor
    lam: float

    def train(self, blocks: Sequence[int]) -> Tensor:
        """(ΦΦᵀ + λI)⁻¹ Φ"""
        sizes, rows = self.source.sizes, self.source.sizes.rows(blocks)
        total = torch.zeros(rows.stop - rows.start, sizes.width, dtype=self.inverse.dtype)
        for s, here in enumerate(sizes.cuts):
            total.addmm_(self.inverse[rows, here], self.source.block(s).to(self.inverse.dtype))
        return numbers.rounded(total, sizes.dtype)

    def combine(self, coefficients: Tensor) -> Tensor:
        """Coefficients (S, N) times K g(n), in one pass and without the cancellation of `apply`."""
        sizes, mixed = self.source.sizes, coefficients.to(self.inverse.dtype) @ self.inverse
        total = torch.zeros(len(mixed), sizes.width, dtype=self.inverse.dtype)
        for s, here in enumerate(sizes.cuts):
            total.addmm_(mixed[:, here], self.source.block(s).to(self.inverse.dtype))
        return numbers.rounded(total, sizes.dtype)

    def apply(self, rows: Tensor) -> Tensor:
        """A (ΦᵀΦ + λI)⁻¹ = (A − A Φᵀ (ΦΦᵀ + λI)⁻¹ Φ) / λ for rows A that are not those of Φ."""
        if self.lam == 0:
            raise UndeError("without damping the dual form has no inverse for other rows: raise the damping")
        a, cuts = rows.double(), self.source.sizes.cuts
        products = torch.cat([a @ self.source.block(s).double().T for s in range(len(cuts))], 1)  # (n, N)
        solved, out = products @ self.inverse.double(), a
        for s, here in enumerate(cuts):
            out = out - solved[:, here] @ self.source.block(s).double()
        return numbers.rounded(out / self.lam, rows.dtype)


def assembled(panels: Sequence[Tensor]) -> Tensor:
    """A symmetric matrix in float64 from panels of rows, each up to its diagonal block."""
    side = panels[-1].shape[1]
    gram = torch.zeros(side, side, dtype=torch.float64)
    for panel in panels:
        stop = panel.shape[1]
        start = stop - len(panel)
        gram[start:stop, :stop] = panel
        gram[:start, start:stop] = panel[:, :start].T
    return gram


def inverse(
    gram: Tensor,
    damping: float,
    relative: bool,
    width: int,
    rounding: float = 0.0,
    unit: float | None = None,
) -> tuple[Tensor, float]:
    """(gram + λI)⁻¹ in place, and λ; the mean diagonal is that of ΦᵀΦ, `width` long, also where `gram` is ΦΦᵀ.

    `rounding` is that of the entries of Φ as they are stored, `unit` what relative damping is a multiple of if not of
    that mean.
    """
    norm, trace = float(gram.norm()), float(gram.diagonal().sum())
    if not math.isfinite(norm):
        raise UndeError(
            "the kernel ΦᵀΦ holds NaN or infinite entries: some features are not finite, or too large to "
            "square. Rebuild the index with on_bad='skip', or rescale the loss"
        )
    if trace == 0:
        raise UndeError("all features of the index are zero: has the loss a gradient?")
    unit = trace / width if unit is None else unit
    lam = damped(damping, relative, unit)
    gram.diagonal().add_(lam)
    scale = gram.diagonal().clone()
    failed = torch.empty((), dtype=torch.int32)
    torch.linalg.cholesky_ex(gram, out=(gram, failed))
    if not failed:
        torch.cholesky_inverse(gram, out=gram)
    explained = gram.diagonal() * scale
    if failed or not float(explained.max()) < _SINGULAR:
        raise UndeError(
            f"ΦᵀΦ + λI is singular at λ = {lam:.3g} ({len(gram):,} × {len(gram):,}): raise the damping"
        )
    numbers.check_rounding(
        float(explained.mean()), rounding, lam, trace / len(gram), unit if relative else None
    )
    return gram, lam
