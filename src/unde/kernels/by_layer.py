"""The diagonal blocks of (ΦᵀΦ + λI)⁻¹, one for each layer with its own damping (LoGRA, app. B.3).

Many small inverses in place of a large one. K does not mix layers, so it acts on the query side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.kernels.base import (
    Moments,
    Needs,
    Part,
    Reduction,
    Round,
    Sizes,
    Source,
    Work,
    chunks,
    damped,
    pending,
    read,
    without_content,
)
from unde.kernels.full import ILL, inverse
from unde.kernels.numbers import within


@dataclass(frozen=True)
class ByLayer:
    damping: float
    relative: bool
    sizes: Sizes
    key: str = "by layer"

    @cached_property
    def layers(self) -> dict[str, list[slice]]:
        return layer_columns(self.sizes.parts)

    @property
    def blocks(self) -> Sequence[Sequence[slice]]:
        return list(self.layers.values())

    @property
    def rounds(self) -> Sequence[Round]:
        return [Round("grams", len(self.sizes.runs()), self._job)]

    def _job(self, source: Source, i: int, before: Moments) -> Moments:
        """ΦᵀΦ of each layer over a run of blocks, in float64: they are small."""
        grams = {name: torch.zeros(d, d, dtype=torch.float64) for name, d in self._widths.items()}
        for phi in chunks(source, self.sizes.runs()[i]):
            for name, columns in self.layers.items():
                part = columns_of(phi, columns).double()
                grams[name].addmm_(part.T, part)
            del phi, part  # before the next is read
        return grams

    def fit(self, moments: Moments, source: Source) -> _Fitted:
        inverses = [(columns, self._inverse(name, moments[name])) for name, columns in self.layers.items()]
        if all(made is None for _, made in inverses):
            raise UndeError("all features of the index are zero: has the loss a gradient?")
        return _Fitted(source, inverses)

    def _inverse(self, name: str, gram: Tensor) -> Tensor | None:
        """(ΦᵀΦ + λI)⁻¹ of a layer; None where all its features are zero."""
        if float(gram.diagonal().sum()) == 0:
            return None
        lam = damped(self.damping, self.relative, float(gram.diagonal().mean()))
        well = float(gram.norm()) <= ILL * lam
        try:
            made, _ = inverse(gram.clone(), self.damping, self.relative, len(gram), self.sizes.rounding)
        except UndeError as e:
            raise UndeError(f"layer {name!r}: {e}") from None
        return within(made, self.sizes.dtype) if well else made

    def needs(self) -> Needs:
        widths, jobs, rows = list(self._widths.values()), len(self.sizes.runs()), self.sizes.most
        squares, chunk = [d * d for d in widths], 4 * rows * self.sizes.width
        n, total = self.sizes.examples, 8 * sum(squares)
        once = 2 * n * sum(squares)
        columns = [8 * rows * (a + b) for a, b in zip(widths, [0, *widths])]  # of a layer and the one before
        job = total + max(self.sizes.read(), chunk + max(columns))
        items = [4 if self._well(d) else 8 for d in widths]
        made = [item * square for item, square in zip(items, squares)]
        spent = [
            sum(made[:i]) + 8 * square + (item if item == 4 else 0) * square
            for i, (item, square) in enumerate(zip(items, squares))
        ]
        applied = 2 * chunk + 12 * rows * max(widths)
        return Needs(
            matrices=total + 8 * max(squares),
            held=sum(made),
            gather=Work(max(job, pending(jobs, total, 8 * max(squares))), once, n),
            fit=Work(total + max(spent), sum(d**3 for d in widths)),
            train=Work(max(self.sizes.read(), applied), once, n),
            apply=Work(applied, once),
            moments={name: without_content(d, d, dtype=torch.float64) for name, d in self._widths.items()},
            rounds=(Reduction("grams", jobs, once, n, jobs * total),),
        )

    def _well(self, width: int) -> bool:
        """Whether the inverse of a layer is sure to be kept in the precision of features."""
        return self.relative and width <= ILL * self.damping

    def check(self, memory: int) -> None:
        d = max(self._widths.values())
        self.needs().check(memory, f"the kernels of {len(self.layers)} layers (up to {d:,} × {d:,}) need")

    @cached_property
    def _widths(self) -> dict[str, int]:
        return {name: sum(c.stop - c.start for c in columns) for name, columns in self.layers.items()}


@dataclass(frozen=True)
class _Fitted:
    source: Source
    inverses: list[tuple[list[slice], Tensor | None]]

    def apply(self, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for columns, made in self.inverses:
            if made is None:
                continue
            values = columns_of(rows, columns).to(made.dtype) @ made
            for c, part in zip(columns, values.split([c.stop - c.start for c in columns], 1)):
                out[:, c] = part
        return out

    def train(self, blocks: Sequence[int]) -> Tensor:
        return self.apply(read(self.source, blocks))


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


def columns_of(phi: Tensor, columns: Sequence[slice]) -> Tensor:
    return phi[:, columns[0]] if len(columns) == 1 else torch.cat([phi[:, c] for c in columns], 1)
