"""The empirical kernel of TRAK, K = (ΦᵀΦ + λI)⁻¹ (Eq. 2), applied once to the training side in blocks.

With N examples and D features the smaller of two equal forms is used:

    primal   Φ (ΦᵀΦ + λI)⁻¹       a D × D inverse
    dual     (ΦΦᵀ + λI)⁻¹ Φ       an N × N inverse

`blocks="layer"` keeps of ΦᵀΦ the diagonal blocks of single layers only, each with its own relative damping, as
LoGRA does: many small inverses in place of a large one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.kernels.base import Block, Part, width

# ‖ΦᵀΦ‖/λ above which all is done in float64: rounding to float32 would be like another λ, 1 % off. Relative
# damping of 0.1 stays below it up to 10,000 features.
_ILL = 1e5
_SMALL = 128  # rows of a kernel up to which all is done in float64, since it costs nothing

# A_ii (A⁻¹)_ii is one over the part of column i that the others do not explain, whatever its units. Where they
# explain all of it, rounding leaves 1e13 or more.
_SINGULAR = 1e12


@dataclass(frozen=True)
class Gram:
    damping: float
    relative: bool = True
    form: str = "auto"
    blocks: str = "full"

    def apply(
        self,
        blocks: Sequence[Block],
        parts: Sequence[Part],
        memory: int,
        fit: Sequence[Block] | None = None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Φ K in the blocks of Φ, one after the other, in the precision of Φ.

        >>> phi = torch.randn(6, 3, dtype=torch.float64)
        >>> rows, parts = [(slice(0, 6), lambda: phi)], [Part("weight", slice(0, 3))]
        >>> [(_, out)] = Gram(2.0, relative=False).apply(rows, parts, memory=10**9)
        >>> torch.allclose(out, phi @ torch.linalg.inv(phi.T @ phi + 2 * torch.eye(3, dtype=torch.float64)))
        True
        """
        given = blocks[0][1]().dtype
        if self.blocks == "layer":
            made = self._by_layer(blocks, fit or blocks, parts, memory, given)
        else:
            made = self._whole(blocks, fit or blocks, width(parts), memory, given)
        for rows, out in made:
            yield rows, out.to(given)

    def _whole(
        self, blocks: Sequence[Block], fit: Sequence[Block], d: int, memory: int, given: torch.dtype
    ) -> Iterator[tuple[slice, Tensor]]:
        n = fit[-1][0].stop
        primal = self.form == "primal" or (self.form == "auto" and d <= n)
        side = d if primal else n
        need = 2 * 8 * side * side  # a matrix of float64, and one more to work with
        if need > memory:
            raise UndeError(
                f"the {'D × D' if primal else 'N × N'} kernel ({side:,} × {side:,}) needs "
                f"{need / 2**30:.3g} GiB, the memory budget is {memory / 2**30:.3g} GiB: raise memory=, or "
                "build with a smaller projection"
            )
        left = memory - need // 2
        make = partial(_gram_primal if primal else _gram_dual, fit, d, left // 4)
        inverse, lam = self._inverse(make, d, torch.float64 if side <= _SMALL else given)
        if primal:
            yield from _apply_primal(blocks, inverse)
        elif fit is blocks:
            yield from _apply_dual(blocks, inverse, d, left)
        else:
            yield from _apply_dual_elsewhere(blocks, fit, inverse, lam)

    def _by_layer(
        self,
        blocks: Sequence[Block],
        fit: Sequence[Block],
        parts: Sequence[Part],
        memory: int,
        given: torch.dtype,
    ) -> Iterator[tuple[slice, Tensor]]:
        """One pass over Φ for all Gram matrices, one to apply their inverses."""
        layers = layer_columns(parts)
        sizes = [sum(c.stop - c.start for c in columns) for columns in layers.values()]
        need = 8 * (sum(d * d for d in sizes) + max(sizes) ** 2)
        if need > memory:
            raise UndeError(
                f"the kernels of {len(layers)} layers (up to {max(sizes):,} × {max(sizes):,}) need "
                f"{need / 2**30:.3g} GiB, the memory budget is {memory / 2**30:.3g} GiB: raise memory=, or "
                "build with a smaller projection"
            )
        make = partial(_grams, fit, list(layers.values()), memory - need)
        inverses = self._inverses(make, list(layers), given)
        for rows, read in blocks:
            phi, out = read(), None
            for columns, inverse in zip(layers.values(), inverses):
                if inverse is None:
                    continue
                part = columns_of(phi, columns).to(inverse.dtype) @ inverse
                out = torch.zeros_like(phi) if out is None else out
                _put(out, columns, part)
            yield rows, torch.zeros_like(phi) if out is None else out

    def _inverses(
        self,
        make: Callable[[torch.dtype], list[Tensor]],
        names: list[str],
        precision: torch.dtype,
    ) -> list[Tensor | None]:
        """(ΦᵀΦ + λI)⁻¹ of each layer; None where all its features are zero."""
        grams = make(precision)
        if precision != torch.float64 and any(
            float(g.norm()) > _ILL * self._damping(g) for g in grams if float(g.diagonal().sum()) > 0
        ):
            del grams
            grams = make(torch.float64)
            precision = torch.float64
        found: list[Tensor | None] = []
        for name, gram in zip(names, grams):
            dead = float(gram.diagonal().sum()) == 0
            try:
                found.append(
                    None if dead else self._inverse(lambda _, g=gram: g, len(gram), torch.float64)[0]
                )
            except UndeError as e:
                raise UndeError(f"layer {name!r}: {e}") from None
        if all(inverse is None for inverse in found):
            raise UndeError("all features of the index are zero: has the loss a gradient?")
        return [None if inverse is None else inverse.to(precision) for inverse in found]

    def _damping(self, gram: Tensor) -> float:
        return self.damping * float(gram.diagonal().mean()) if self.relative else self.damping

    def _inverse(
        self, make: Callable[[torch.dtype], Tensor], d: int, precision: torch.dtype
    ) -> tuple[Tensor, float]:
        """(gram + λI)⁻¹, made in the memory of one matrix, in the precision that is needed to use it; and λ."""
        gram = make(precision)
        norm, trace = float(gram.norm()), float(gram.diagonal().sum())
        if not math.isfinite(norm):
            raise UndeError(
                "the kernel ΦᵀΦ holds NaN or infinite entries: some features are not finite, or too large to "
                "square. Rebuild the index with on_bad='skip', or rescale the loss"
            )
        if trace == 0:
            raise UndeError("all features of the index are zero: has the loss a gradient?")
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
            raise UndeError(
                f"ΦᵀΦ + λI is singular at λ = {lam:.3g} ({len(gram):,} × {len(gram):,}): raise the damping"
            )
        return gram.to(precision), lam


def layer_columns(parts: Sequence[Part]) -> dict[str, list[slice]]:
    """The columns of each layer, as runs."""
    found: dict[str, list[slice]] = {}
    for part in parts:
        runs = found.setdefault(part.layer, [])
        if runs and runs[-1].stop == part.columns.start:
            runs[-1] = slice(runs[-1].start, part.columns.stop)
        else:
            runs.append(part.columns)
    return found


def columns_of(phi: Tensor, columns: list[slice]) -> Tensor:
    return phi[:, columns[0]] if len(columns) == 1 else torch.cat([phi[:, c] for c in columns], 1)


def _put(out: Tensor, columns: list[slice], values: Tensor) -> None:
    for c, part in zip(columns, values.split([c.stop - c.start for c in columns], 1)):
        out[:, c] = part


def _grams(
    blocks: Sequence[Block], layers: list[list[slice]], memory: int, precision: torch.dtype
) -> list[Tensor]:
    """ΦᵀΦ of each layer: products in `precision`, summed in float64."""
    sizes = [sum(c.stop - c.start for c in columns) for columns in layers]
    grams = [torch.zeros(d, d, dtype=torch.float64) for d in sizes]
    for taken in _fitting(blocks, sum(sizes), memory):
        phi = _joined(taken).to(precision)
        for gram, columns in zip(grams, layers):
            part = columns_of(phi, columns)
            gram += part.T @ part
    return grams


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


def _apply_dual_elsewhere(
    blocks: Sequence[Block], fit: Sequence[Block], inverse: Tensor, lam: float
) -> Iterator[tuple[slice, Tensor]]:
    """A (ΦᵀΦ + λI)⁻¹ = (A − A Φᵀ (ΦΦᵀ + λI)⁻¹ Φ) / λ for rows A that are not those of Φ."""
    if lam == 0:
        raise UndeError("without damping the dual form has no inverse for other rows: raise the damping")
    for rows, read in blocks:
        a = read().double()
        products = torch.cat([a @ phi().double().T for _, phi in fit], 1)  # (n, N)
        solved, out = products @ inverse.double(), a
        for cols, phi in fit:
            out = out - solved[:, cols] @ phi().double()
        yield rows, out / lam


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
