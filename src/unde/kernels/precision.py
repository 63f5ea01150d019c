"""Damped inverses and their precision: products beyond the range of float32, and features stored too coarsely.

Losses may be scaled by anything, and K undoes it: Φ K Φᵀ has no unit. What lies between may be far out of the range of
float32 all the same, and is then kept in float64. Ordinary numbers go the way they always went.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unde.devices import double_device, put
from unde.errors import UndeError

# ‖ΦᵀΦ‖/λ above which all is done in float64: rounding to float32 would be like another λ, 1 % off.
ILL = 1e5
# A_ii (A⁻¹)_ii is one over the part of column i that the others do not explain, whatever its units. Where they
# explain all of it, rounding leaves 1e13 or more.
_SINGULAR = 1e12
_LEAST, _MOST = 2.0**-100, 2.0**100  # largest entries of a matrix that may be worked with in float32
_NOISE = 0.003  # share of rounding that is put up with in what a kernel sees, in squares: 5 % of its size
# Whoever stores in four bits has more than that from the start, and ranks with it. Then it may grow so many times, to
# 60 % of the size of what a kernel sees: on the banks of docs/scale.md rankings stayed as good.
_GROWN = 25
# The square of a rounding error that is spread evenly, in units of the largest one, on average over the digits.
_SPREAD = 1 / 6


def damping_value(damping: float, relative: bool, mean: float) -> float:
    """λ: a multiple of the mean diagonal of the inverted matrix, or absolute."""
    return damping * mean if relative else damping


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, in float64 where float32 would overflow, or lose what is small."""
    out = a @ b
    return out if out.dtype == torch.float64 or _LEAST < _size(out) < _MOST else double(a) @ double(b)


def double(x: Tensor) -> Tensor:
    """x in float64, on its device or, where that has none, on the CPU."""
    return put(x, x.device, torch.float64)


def zeros(*shape: int, device: torch.device) -> Tensor:
    """Zeros in float64, to add up what is computed on a device."""
    return torch.zeros(shape, dtype=torch.float64, device=double_device(device))


def cast_if_in_range(made: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """`made` in the precision and on the device of features, or as it is where its numbers are beyond their range."""
    return put(made, device or made.device, dtype) if _LEAST < _size(made) < _MOST or not made.any() else made


def round_to(values: Tensor, rows: Tensor) -> Tensor:
    """K g in the precision of features, and on the device of such `rows`."""
    out = values.to(rows)
    size = _size(out)
    if not size < math.inf or (size < torch.finfo(rows.dtype).tiny and values.any()):
        small = "small: multiply" if not size < math.inf else "large: divide"
        raise UndeError(
            f"K times features does not fit in float32, since the features are so {small} the loss by a constant, "
            "which these scores do not depend on, and build again"
        )
    return out


def assemble(panels: Sequence[Tensor]) -> Tensor:
    """A symmetric matrix in float64 from panels of rows, each up to its diagonal block."""
    side = panels[-1].shape[1]
    gram = zeros(side, side, device=panels[-1].device)
    for panel in panels:
        stop = panel.shape[1]
        start = stop - len(panel)
        gram[start:stop, :stop] = panel
        gram[:start, start:stop] = panel[:, :start].T
    return gram


@dataclass(frozen=True)
class DampedMatrix:
    """ΦᵀΦ + λI, `width` columns of Φ, or ΦΦᵀ + λI: what is known of it before it is inverted.

    `rounding` is that of the entries of Φ as they are stored, `unit` what a relative λ is a multiple of.
    """

    side: int
    norm: float  # of the matrix without λ
    trace: float
    lam: float
    unit: float | None
    rounding: float

    @property
    def fits(self) -> bool:
        """Whether the inverse can be rounded to float32: its largest entry is 1/(λ + ‖ΦᵀΦ‖) to 1/λ."""
        well = self.norm <= ILL * self.lam
        return well and self.lam > 1 / _MOST and self.lam + self.norm < 1 / _LEAST

    def invert(self, gram: Tensor) -> Tensor:
        """Invert in place; what `check` has to see, on the device, so that the host does not wait."""
        gram.diagonal().add_(self.lam)
        scale = gram.diagonal().clone()
        failed = torch.empty((), dtype=torch.int32, device=gram.device)
        torch.linalg.cholesky_ex(gram, out=(gram, failed))
        try:
            torch.cholesky_inverse(gram, out=gram)
        except torch.linalg.LinAlgError:
            raise self._singular() from None
        explained = gram.diagonal() * scale
        return torch.stack([failed.to(scale), explained.max(), explained.mean()])

    def check(self, failed: float, largest: float, mean: float) -> None:
        if failed or not largest < _SINGULAR:
            raise self._singular()
        check_rounding(mean, self.rounding, self.lam, self.trace / self.side, self.unit)

    def _singular(self) -> UndeError:
        return UndeError(
            f"ΦᵀΦ + λI is singular at λ = {self.lam:.3g} ({self.side:,} × {self.side:,}): raise the damping"
        )


def measure(grams: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Norm and trace of each matrix; the host waits once."""
    return torch.stack([torch.stack([g.norm(), g.diagonal().sum()]) for g in grams]).tolist()


def damp(
    side: int,
    measured: tuple[float, float],
    damping: float,
    relative: bool,
    width: int,
    rounding: float = 0.0,
    unit: float | None = None,
) -> DampedMatrix:
    """λ of a matrix with this norm and trace; a multiple of `unit`, by default the mean diagonal of ΦᵀΦ."""
    norm, trace = measured
    if not math.isfinite(norm):
        raise UndeError(
            "the kernel ΦᵀΦ holds NaN or infinite entries: some features are not finite, or too large to "
            "square. Rebuild the index with on_bad='skip', or rescale the loss"
        )
    if trace == 0:
        raise UndeError("all features of the index are zero: has the loss a gradient?")
    unit = trace / width if unit is None else unit
    lam = damping_value(damping, relative, unit)
    return DampedMatrix(side, norm, trace, lam, unit if relative else None, rounding)


def check_rounding(
    explained: float, rounding: float, lam: float, diagonal: float, unit: float | None
) -> None:
    """Refuses λ where rounding of the stored features would decide the scores.

    Column j of Φ is stored with noise of about `rounding`²/6 of its square. The part of it that the other columns do
    not explain is one over A_jj (A⁻¹)_jj, with A = ΦᵀΦ + λI; what that is on average is `explained`. So their product
    is the share of noise in what K sees. `diagonal` is the mean of ΦᵀΦ, which bounds `explained` by 1 + diagonal / λ,
    and `unit` what relative damping is a multiple of, None where it is absolute.
    """
    noise = rounding**2 * _SPREAD
    share, most = explained * noise, max(_NOISE, _GROWN * noise)
    if share <= most:
        return
    least = diagonal / (most / noise - 1)
    raise UndeError(
        f"at λ = {lam:.3g} the rounding of the features, which are not stored in float32, would be "
        f"{min(1.0, math.sqrt(share)):.0%} of what the kernel sees: raise the damping to at least "
        f"{_up(least if unit is None else least / unit)}, or build with store_dtype='float32'"
    )


def could_refuse(rounding: float, damping: float, wide: float = 1.0) -> bool:
    """Whether `check_rounding` may refuse a relative damping, for features `wide` times as many as what is inverted.

    >>> could_refuse(2**-6, 0.1), could_refuse(2**-6, 0.1, wide=10), could_refuse(0.0, 0.0001)
    (False, True, False)
    """
    noise = rounding**2 * _SPREAD
    return noise * (1 + wide / damping) > max(_NOISE, _GROWN * noise)


def _up(value: float) -> str:
    """Two digits, never less than the value.

    >>> _up(0.000256001)
    '0.00026'
    """
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / step) * step:.2g}"


def _size(x: Tensor) -> float:
    """The largest absolute value; NaN if there is one."""
    if not x.numel():
        return 0.0
    low, high = torch.stack(torch.aminmax(x)).tolist()  # the host waits once
    return math.nan if math.isnan(low) else max(-low, high)
