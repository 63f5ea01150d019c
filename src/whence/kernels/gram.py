"""The empirical kernel of TRAK, K = (ΦᵀΦ + λI)⁻¹ (Eq. 2), applied once to the training side in blocks.

With N examples and D features the smaller of two equal forms is used:

    primal   Φ (ΦᵀΦ + λI)⁻¹       a D × D inverse
    dual     (ΦΦᵀ + λI)⁻¹ Φ       an N × N inverse
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from whence.errors import WhenceError

Block = tuple[slice, Callable[[], Tensor]]  # consecutive rows of Φ, and how to read them: (n, D)

# ‖ΦᵀΦ‖/λ above which all is done in float64: rounding to float32 would be like another λ, 1 % off. Relative
# damping of 0.1 stays below it up to 10,000 features.
_ILL = 1e5

# A_ii (A⁻¹)_ii is one over the part of column i that the others do not explain, whatever its units. Where they
# explain all of it, rounding leaves 1e13 or more.
_SINGULAR = 1e12


@dataclass(frozen=True)
class Gram:
    damping: float
    relative: bool = True
    form: str = "auto"

    def apply(self, blocks: Sequence[Block], d: int, memory: int) -> Iterator[tuple[slice, Tensor]]:
        """Φ K in the blocks of Φ, one after the other, in the precision of Φ.

        >>> phi = torch.randn(6, 3, dtype=torch.float64)
        >>> [(rows, out)] = Gram(2.0, relative=False).apply([(slice(0, 6), lambda: phi)], 3, memory=10**9)
        >>> torch.allclose(out, phi @ torch.linalg.inv(phi.T @ phi + 2 * torch.eye(3, dtype=torch.float64)))
        True
        """
        n = blocks[-1][0].stop
        primal = self.form == "primal" or (self.form == "auto" and d <= n)
        side = d if primal else n
        need = 2 * 8 * side * side  # a matrix of float64, and one more to work with
        if need > memory:
            raise WhenceError(
                f"the {'D × D' if primal else 'N × N'} kernel ({side:,} × {side:,}) needs "
                f"{need / 2**30:.3g} GiB, the memory budget is {memory / 2**30:.3g} GiB: raise memory=, or "
                "build with a smaller projection"
            )
        left = memory - need // 2
        make = partial(_gram_primal if primal else _gram_dual, blocks, d, left // 4)
        given = blocks[0][1]().dtype
        inverse = self._inverse(make, d, given)
        made = _apply_primal(blocks, inverse) if primal else _apply_dual(blocks, inverse, d, left)
        for rows, out in made:
            yield rows, out.to(given)

    def _inverse(self, make: Callable[[torch.dtype], Tensor], d: int, precision: torch.dtype) -> Tensor:
        """(gram + λI)⁻¹, made in the memory of one matrix, in the precision that is needed to use it."""
        gram = make(precision)
        norm, trace = float(gram.norm()), float(gram.diagonal().sum())
        if not math.isfinite(norm):
            raise WhenceError(
                "the kernel ΦᵀΦ holds NaN or infinite entries: some features are not finite, or too large to "
                "square. Rebuild the index with on_bad='skip', or rescale the loss"
            )
        if trace == 0:
            raise WhenceError("all features of the index are zero: has the loss a gradient?")
        lam = self.damping * trace / d if self.relative else self.damping
        if norm > _ILL * lam and precision != torch.float64:
            precision = torch.float64
            del gram
            gram = make(precision)
        gram.diagonal().add_(lam)
        scale = gram.diagonal().clone()
        failed = torch.empty((), dtype=torch.int32)
        torch.linalg.cholesky_ex(gram, out=(gram, failed))
        if not failed:
            torch.cholesky_inverse(gram, out=gram)
        if failed or not float((gram.diagonal() * scale).max()) < _SINGULAR:
            raise WhenceError(
                f"ΦᵀΦ + λI is singular at λ = {lam:.3g} ({len(gram):,} × {len(gram):,}): raise the damping"
            )
        return gram.to(precision)


def _gram_primal(blocks: Sequence[Block], d: int, memory: int, precision: torch.dtype) -> Tensor:
    """ΦᵀΦ: products in `precision`, summed in float64."""
    gram = torch.zeros(d, d, dtype=torch.float64)
    for taken in _fitting(blocks, d, memory):  # the fewer sums of D × D the better
        phi = _joined(taken).to(precision)
        gram += phi.T @ phi
    return gram


def _gram_dual(blocks: Sequence[Block], d: int, memory: int, precision: torch.dtype) -> Tensor:
    """ΦΦᵀ: products in `precision`."""
    n = blocks[-1][0].stop
    gram = torch.zeros(n, n, dtype=torch.float64)
    for taken in _fitting(blocks, d, memory):
        rows = slice(taken[0][0].start, taken[-1][0].stop)
        phi = _joined(taken).to(precision)
        for cols, read in blocks:
            if cols.start < rows.stop:
                part = (phi @ read().to(precision).T).double()
                gram[rows, cols] = part
                gram[cols, rows] = part.T
    return gram


def _apply_primal(blocks: Sequence[Block], inverse: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Φ (ΦᵀΦ + λI)⁻¹."""
    for rows, read in blocks:
        yield rows, read().to(inverse.dtype) @ inverse


def _apply_dual(
    blocks: Sequence[Block], inverse: Tensor, d: int, memory: int
) -> Iterator[tuple[slice, Tensor]]:
    """(ΦΦᵀ + λI)⁻¹ Φ, as many output rows in one pass over Φ as the budget holds."""
    for taken in _fitting(blocks, d, memory):
        first, last = taken[0][0].start, taken[-1][0].stop
        total = torch.zeros(last - first, d, dtype=inverse.dtype)
        for rows, read in blocks:
            total.addmm_(inverse[first:last, rows], read().to(inverse.dtype))
        for rows, _ in taken:
            yield rows, total[rows.start - first : rows.stop - first]


def _fitting(blocks: Sequence[Block], d: int, memory: int) -> Iterator[list[Block]]:
    """Runs of blocks, at least one in each, whose rows fit the budget twice over in float64."""
    run: list[Block] = []
    for block in blocks:
        if run and block[0].stop - run[0][0].start > memory // (16 * d):
            yield run
            run = []
        run.append(block)
    yield run


def _joined(run: list[Block]) -> Tensor:
    parts = [read() for _, read in run]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
