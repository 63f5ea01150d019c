"""The kernel of LoGRA (app. B.3): the diagonal blocks of (ΦᵀΦ + λI)⁻¹, one for each layer.

Many small inverses in place of a large one. K does not mix layers, so it acts on the query side. A layer with more
columns d than there are rows n is inverted in the dual form, n × n:

    K = (ΦᵀΦ + λI)⁻¹ = (I − Φᵀ (ΦΦᵀ + λI)⁻¹ Φ) / λ

which takes two passes over the stored features when K is applied.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unde.devices import double_device, put
from unde.errors import UndeError
from unde.kernels import precision as numbers
from unde.kernels.base import (
    BoundKernel,
    FeatureLayout,
    Fitted,
    KernelSource,
    Moments,
    Needs,
    ParameterColumns,
    Round,
    chunks,
    meta_tensor,
    read,
)

_TRACES = "traces of dual layers"  # among moments; no module has such a name


@dataclass(frozen=True)
class LayerBlocks(BoundKernel):
    sizes: FeatureLayout
    damping: float
    relative: bool
    damping_scope: str = "layer"

    @property
    def key(self) -> str:
        return "by layer, dual where smaller" if self._dual else "by layer"

    @cached_property
    def layers(self) -> dict[str, list[slice]]:
        return layer_columns(self.sizes.parts)

    @property
    def blocks(self) -> Sequence[Sequence[slice]]:
        return list(self.layers.values())

    @property
    def rounds(self) -> Sequence[Round]:
        panels = (
            [Round("panels", len(self.sizes.joined()), self._panels, self._assemble)] if self._dual else []
        )
        return [Round("grams", len(self.sizes.runs()), self._job), *panels]

    def _job(self, source: KernelSource, i: int, before: Moments) -> Moments:
        """ΦᵀΦ of each layer over a run of blocks, in float64: they are small. Of dual layers, the trace alone."""
        grams = {name: numbers.zeros(d, d, device=source.device) for name, d in self._primal.items()}
        traces = numbers.zeros(len(self._dual), device=source.device)
        for phi in chunks(source, self.sizes.runs()[i]):
            phi = phi.to(traces.device)  # once for all layers, where the device has no float64
            for name in grams:
                part = numbers.double(columns_of(phi, self.layers[name]))
                grams[name].addmm_(part.T, part)
                del part
            for j, name in enumerate(self._dual):
                traces[j] += columns_of(phi, self.layers[name]).to(traces, copy=True).square_().sum()
            del phi  # before the next is read
        return grams | ({_TRACES: traces} if self._dual else {})

    def _panels(self, source: KernelSource, i: int, before: Moments) -> Moments:
        """ΦΦᵀ of each dual layer, of joined blocks with all rows up to theirs."""
        joined, out = self.sizes.joined(), {}
        place = double_device(source.device)
        here = read(source, joined[i]).to(place)
        for b in range(i + 1):
            other = here if b == i else read(source, joined[b]).to(place)
            for name in self._dual:
                left = numbers.double(columns_of(here, self.layers[name]))
                right = left if b == i else numbers.double(columns_of(other, self.layers[name]))
                out.setdefault(name, []).append(left @ right.T)
                del left, right
        return {f"panel {i:06d} {name}": torch.cat(panels, 1) for name, panels in out.items()}

    def _assemble(self, panels: Moments) -> Moments:
        return {
            name: numbers.assemble([panels[key] for key in sorted(panels) if key.split(" ", 2)[2] == name])
            for name in self._dual
        }

    def fit(self, moments: Moments, source: KernelSource) -> Fitted:
        measured = dict(zip(self.layers, numbers.measure([moments[name] for name in self.layers])))
        if not any(trace for _, trace in measured.values()):
            raise UndeError("all features of the index are zero: has the loss a gradient?")
        whole = sum(trace for _, trace in measured.values()) / self.sizes.width
        damped, inverses, duals, found = {}, [], [], []
        for name, columns in self.layers.items():
            if measured[name][1] == 0:
                continue  # K is 0 there
            with _named(name):
                here = damped[name] = self._damp(name, len(moments[name]), measured[name], whole)
                made = moments[name].clone()
                found.append(here.invert(made))
            if name in self._dual:
                duals.append((columns, made, here.lam))
            else:
                made = put(made, source.device, self.sizes.dtype) if here.fits else made
                inverses.append((columns, made))
        for (name, here), seen in zip(damped.items(), torch.stack(found).tolist()):  # the host waits once
            with _named(name):
                here.check(*seen)
        return FittedLayers(source, inverses, duals)

    def _damp(
        self, name: str, side: int, measured: tuple[float, float], whole: float
    ) -> numbers.DampedMatrix:
        unit = whole if self.damping_scope == "model" else None
        here = numbers.damp(
            side, measured, self.damping, self.relative, self._widths[name], self.sizes.rounding, unit
        )
        if here.lam == 0 and name in self._dual:
            raise UndeError(
                f"ΦᵀΦ + λI is singular at λ = 0, with {self._widths[name]:,} columns and {side:,} rows: "
                "raise the damping"
            )
        return here

    def needs(self) -> Needs:
        n, dual = self.sizes.examples, self._dual
        moments = {name: meta_tensor(d, d) for name, d in self._primal.items()}
        if dual:
            moments[_TRACES] = meta_tensor(len(dual))
            moments |= {name: meta_tensor(n, n) for name in dual}
        squares = [8 * min(d, n) ** 2 for d in self._widths.values()]
        return Needs(sum(squares) + max(squares), moments)

    @property
    def described(self) -> str:
        d = max(min(d, self.sizes.examples) for d in self._widths.values())
        return f"the kernels of {len(self.layers)} layers (up to {d:,} × {d:,}) need"

    @cached_property
    def _widths(self) -> dict[str, int]:
        return {name: sum(c.stop - c.start for c in columns) for name, columns in self.layers.items()}

    @cached_property
    def _primal(self) -> dict[str, int]:
        return {name: d for name, d in self._widths.items() if d <= self.sizes.examples}

    @cached_property
    def _dual(self) -> dict[str, int]:
        """The layers with more columns than rows."""
        return {name: d for name, d in self._widths.items() if d > self.sizes.examples}


@dataclass(frozen=True)
class FittedLayers(Fitted):
    inverses: list[tuple[list[slice], Tensor]]
    duals: list[tuple[list[slice], Tensor, float]]  # with (ΦΦᵀ + λI)⁻¹ and λ

    def apply(self, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for columns, made in self.inverses:
            _put(out, columns, columns_of(rows, columns).to(made) @ made)
        if self.duals:
            self._apply_duals(rows, out)
        return out

    def _apply_duals(self, rows: Tensor, out: Tensor) -> None:
        """Two passes over the features: A Φᵀ, then A − A Φᵀ (ΦΦᵀ + λI)⁻¹ Φ."""
        sizes, double, place = self.source.sizes, numbers.double, double_device(rows.device)
        rows = rows.to(place)
        along = [numbers.zeros(len(rows), sizes.examples, device=rows.device) for _ in self.duals]
        for blocks in sizes.joined():
            phi, here = read(self.source, blocks).to(place), sizes.rows(blocks)
            for (columns, _, _), products in zip(self.duals, along):
                products[:, here] = double(columns_of(rows, columns)) @ double(columns_of(phi, columns)).T
            del phi
        left = [columns_of(rows, columns).to(made, copy=True) for columns, made, _ in self.duals]
        for i, (_, made, _) in enumerate(self.duals):
            along[i] = along[i] @ made
        for blocks in sizes.joined():
            phi, here = read(self.source, blocks).to(place), sizes.rows(blocks)
            for (columns, _, _), solved, a in zip(self.duals, along, left):
                a.addmm_(solved[:, here], double(columns_of(phi, columns)), alpha=-1)
            del phi
        for (columns, _, lam), a in zip(self.duals, left):
            _put(out, columns, a.div_(lam))


@contextmanager
def _named(layer: str) -> Generator[None]:
    """Errors say which layer they are about."""
    try:
        yield
    except UndeError as e:
        raise UndeError(f"layer {layer!r}: {e}") from None


def _put(out: Tensor, columns: Sequence[slice], values: Tensor) -> None:
    values = put(values, out.device, out.dtype)
    for c, part in zip(columns, values.split([c.stop - c.start for c in columns], 1)):
        out[:, c] = part


def layer_columns(parts: Sequence[ParameterColumns]) -> dict[str, list[slice]]:
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
