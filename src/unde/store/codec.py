"""Codecs: features as they are stored. A new precision is one class with `pack`, `unpack` and `layout`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from unde.errors import UndeError, unknown

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Codec(Protocol):
    """`columns` are those of each parameter, which may be scaled apart. All that is stored is stored by row."""

    name: ClassVar[str]
    rounding: ClassVar[float]  # of an entry, relative and at most, beyond that of float32
    mapped: ClassVar[bool]  # whether features are handed on as they are mapped, without a copy

    def layout(self, rows: int, columns: Sequence[slice]) -> Layout:
        """Shapes and types of what `pack` gives."""
        ...

    def pack(self, features: Tensor, columns: Sequence[slice]) -> dict[str, Tensor]:
        """What is stored of float32 features (n, D), by name."""
        ...

    def unpack(self, shard: Mapping[str, Tensor], columns: Sequence[slice]) -> Tensor:
        """(n, D) float32 again; of any of the rows."""
        ...

    def nbytes(self, rows: int, columns: Sequence[slice]) -> int:
        """Bytes of what `pack` gives."""
        ...

    def check(self, shard: Mapping[str, Tensor], rows: int, columns: Sequence[slice]) -> None:
        """A ValueError that says why this is not what `pack` gives of so many rows."""
        ...


class Float32:
    name: ClassVar[str] = "float32"
    dtype: ClassVar[torch.dtype] = torch.float32
    rounding: ClassVar[float] = 0.0
    mapped: ClassVar[bool] = True

    def layout(self, rows: int, columns: Sequence[slice]) -> Layout:
        return {"features": ((rows, columns[-1].stop), self.dtype)}

    def pack(self, features: Tensor, columns: Sequence[slice]) -> dict[str, Tensor]:
        return {"features": features.to(self.dtype)}

    def unpack(self, shard: Mapping[str, Tensor], columns: Sequence[slice]) -> Tensor:
        return shard["features"].to(torch.float32)  # float32 is handed on as it is mapped, without a copy

    def nbytes(self, rows: int, columns: Sequence[slice]) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.layout(rows, columns).values())

    def check(self, shard: Mapping[str, Tensor], rows: int, columns: Sequence[slice]) -> None:
        for name, (shape, dtype) in self.layout(rows, columns).items():
            if name not in shard:
                raise ValueError(f"{name!r} is not in it")
            found = (tuple(shard[name].shape), shard[name].dtype)
            if found != (shape, dtype):
                raise ValueError(f"{name!r} is {_told(*found)}, expected {_told(shape, dtype)}")


class BFloat16(Float32):
    name: ClassVar[str] = "bfloat16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    rounding: ClassVar[float] = 2.0**-8
    mapped: ClassVar[bool] = False


class Float16(Float32):
    """float16 spans 12 decades only, gradients more. So each example keeps a power of two for each parameter that
    lifts its largest entry there just below the largest float16, and rounds as float32 would, to 11 bits."""

    name: ClassVar[str] = "float16"
    dtype: ClassVar[torch.dtype] = torch.float16
    rounding: ClassVar[float] = 2.0**-11
    mapped: ClassVar[bool] = False

    def layout(self, rows: int, columns: Sequence[slice]) -> Layout:
        return super().layout(rows, columns) | {"exponent": ((rows, len(columns)), torch.int8)}

    def pack(self, features: Tensor, columns: Sequence[slice]) -> dict[str, Tensor]:
        exponent = (torch.frexp(_largest(features, columns)).exponent - 15).clamp(-126, 126).to(torch.int8)
        scaled = torch.empty_like(features, dtype=self.dtype)
        for c, e in zip(columns, torch.exp2(-exponent.float()).unbind(1)):
            scaled[:, c] = features[:, c] * e.unsqueeze(1)
        return {"features": scaled, "exponent": exponent}

    def unpack(self, shard: Mapping[str, Tensor], columns: Sequence[slice]) -> Tensor:
        return _scaled(super().unpack(shard, columns), torch.exp2(shard["exponent"].float()), columns)


class Int8(Float32):
    """Whole numbers from -127 to 127, and for each example and parameter a scale: its largest entry is ±127 of it.

    Entries are off by half a scale at most. A scale has 17 significant bits, rounded up, so that 127 times it has the
    24 of float32: what is unpacked is exactly number times scale, and packed again it is the same numbers and scales.
    """

    name: ClassVar[str] = "int8"
    dtype: ClassVar[torch.dtype] = torch.int8
    # Noise of a scale²/12 in squares is that of a relative rounding of κ/(127·√2), κ being the largest entry over the
    # root mean square: 0.008 to 0.025 for the parameters of small trained networks, 2⁻⁶ in the middle.
    rounding: ClassVar[float] = 2.0**-6
    mapped: ClassVar[bool] = False

    def layout(self, rows: int, columns: Sequence[slice]) -> Layout:
        return super().layout(rows, columns) | {"scale": ((rows, len(columns)), torch.float32)}

    def pack(self, features: Tensor, columns: Sequence[slice]) -> dict[str, Tensor]:
        largest = _largest(features, columns).to(torch.float32)  # NaN if one is
        if not largest.isfinite().all():
            first = int((~largest.isfinite()).any(1).nonzero()[0])
            raise UndeError(
                f"features to be stored as int8 are NaN or infinite (row {first} of {len(features)}), expected finite "
                "numbers: look at the example and the model, or divide the loss by a constant and build again"
            )
        bits = (largest / _STEPS).clamp(max=_LARGEST).view(torch.int32)
        scale = ((bits + 127) & -128).view(torch.float32)  # the last 7 of 24 bits are zero
        tiny = torch.finfo(torch.float32).tiny
        scale = torch.where(largest > tiny / 2, scale.clamp(min=tiny), 0.0)  # what is smaller is zero
        numbers = torch.empty_like(features, dtype=self.dtype)
        for c, s in zip(columns, torch.where(scale > 0, scale, 1.0).unbind(1)):
            numbers[:, c] = (features[:, c] / s.unsqueeze(1)).round_().clamp_(-_STEPS, _STEPS)
        return {"features": numbers, "scale": scale}

    def unpack(self, shard: Mapping[str, Tensor], columns: Sequence[slice]) -> Tensor:
        return _scaled(super().unpack(shard, columns), shard["scale"], columns)

    def check(self, shard: Mapping[str, Tensor], rows: int, columns: Sequence[slice]) -> None:
        super().check(shard, rows, columns)
        wrong = ~((shard["scale"] >= 0) & (shard["scale"] <= _LARGEST))
        if wrong.any():
            row, unit = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"'scale' of row {row}, parameter {unit} is {float(shard['scale'][row, unit])}, expected a finite "
                "number that is not negative"
            )


_STEPS = 127
_LARGEST = 66052 * 2.0**105  # the largest scale of 17 bits that 127 times is in the range of float32


def _largest(features: Tensor, columns: Sequence[slice]) -> Tensor:
    """(n, U): the largest size of an entry."""
    return torch.stack([features[:, c].abs().amax(1) for c in columns], 1)


def _scaled(features: Tensor, scale: Tensor, columns: Sequence[slice]) -> Tensor:
    """Each parameter's columns times its scale (n, U), in place; neighbours of one size together."""
    for size, run in itertools.groupby(range(len(columns)), lambda u: columns[u].stop - columns[u].start):
        units = list(run)
        c = slice(columns[units[0]].start, columns[units[-1]].stop)
        features[:, c].unflatten(1, (len(units), size)).mul_(scale[:, units[0] : units[-1] + 1].unsqueeze(2))
    return features


def _told(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {shape}"


CODECS: dict[str, Codec] = {c.name: c for c in (Float32(), Float16(), BFloat16(), Int8())}


def codec(name: str) -> Codec:
    """
    >>> codec("float16").nbytes(10, [slice(0, 3), slice(3, 4)])
    100
    >>> codec("int8").nbytes(10, [slice(0, 256), slice(256, 272)])
    2800
    """
    if name not in CODECS:
        raise unknown("store_dtype", name, CODECS)
    return CODECS[name]
