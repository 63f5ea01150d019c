"""The empirical kernel of TRAK, K = (ΦᵀΦ + λI)⁻¹ (Eq. 2), applied once to the training side in blocks.

With N examples and D features the smaller of two equal forms is used:

    primal   Φ (ΦᵀΦ + λI)⁻¹       a D × D inverse
    dual     (ΦΦᵀ + λI)⁻¹ Φ       an N × N inverse
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import WhenceError

Blocks = Callable[[], Iterator[tuple[slice, Tensor]]]  # each call reads Φ anew: (rows, (n, D) float32)


@dataclass(frozen=True)
class Gram:
    damping: float
    relative: bool = True
    form: str = "auto"

    def apply(self, blocks: Blocks, n: int, d: int, memory: int) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of Φ K, rows in the order and cut in which `blocks` gives Φ.

        >>> phi = torch.randn(6, 3, dtype=torch.float64)
        >>> [(rows, out)] = Gram(2.0, relative=False).apply(lambda: iter([(slice(0, 6), phi)]), 6, 3, 10**9)
        >>> torch.allclose(out, phi @ torch.linalg.inv(phi.T @ phi + 2 * torch.eye(3, dtype=torch.float64)))
        True
        """
        primal = self.form == "primal" or (self.form == "auto" and d <= n)
        side = d if primal else n
        need = 2 * 8 * side * side  # the matrix and its inverse, in float64
        if need > memory:
            raise WhenceError(
                f"the {'D × D' if primal else 'N × N'} kernel ({side:,} × {side:,}) needs {need / 2**30:.1f} GiB, "
                f"the memory budget is {memory / 2**30:.1f} GiB: raise memory=, or build with a smaller projection"
            )
        if primal:
            inverse = self._inverse(_gram_primal(blocks, d), d)
            for rows, phi in blocks():
                yield rows, phi @ inverse.to(phi.dtype)
        else:
            inverse = self._inverse(_gram_dual(blocks, n), d)
            yield from _apply_dual(blocks, inverse, d, memory)

    def _inverse(self, gram: Tensor, d: int) -> Tensor:
        trace = float(gram.diagonal().sum())
        if not torch.isfinite(gram).all():
            raise WhenceError("the kernel ΦᵀΦ holds NaN or infinite entries: rebuild the index with on_bad='skip'")
        lam = self.damping * trace / d if self.relative else self.damping
        gram.diagonal().add_(lam)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if failed:
            raise WhenceError(
                f"ΦᵀΦ + λI is singular at λ = {lam:.3g} ({gram.shape[0]:,} × {gram.shape[0]:,}): raise the damping"
            )
        return torch.cholesky_inverse(factor)


def _gram_primal(blocks: Blocks, d: int) -> Tensor:
    gram = None
    for _, phi in blocks():
        gram = torch.zeros(d, d, dtype=torch.float64, device=phi.device) if gram is None else gram
        gram += phi.T @ phi
    assert gram is not None
    return gram


def _gram_dual(blocks: Blocks, n: int) -> Tensor:
    gram = None
    for rows, phi in blocks():
        gram = torch.zeros(n, n, dtype=torch.float64, device=phi.device) if gram is None else gram
        for cols, other in blocks():
            if cols.start > rows.start:
                break
            gram[rows, cols] = (phi @ other.T).to(gram.dtype)
            gram[cols, rows] = gram[rows, cols].T
    assert gram is not None
    return gram


def _apply_dual(blocks: Blocks, inverse: Tensor, d: int, memory: int) -> Iterator[tuple[slice, Tensor]]:
    """(ΦΦᵀ + λI)⁻¹ Φ, as many output rows at a time as the budget holds."""
    cuts = [rows for rows, _ in blocks()]
    budget = max(1, memory // (8 * d))  # rows: the sum and one block
    while cuts:
        taken = [cuts.pop(0)]
        while cuts and cuts[0].stop - taken[0].start <= budget:
            taken.append(cuts.pop(0))
        first, last = taken[0].start, taken[-1].stop
        total = None
        for rows, phi in blocks():
            part = inverse[first:last, rows].to(phi.dtype) @ phi
            total = part if total is None else total.add_(part)
        assert total is not None
        for rows in taken:
            yield rows, total[rows.start - first : rows.stop - first]
