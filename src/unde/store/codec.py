"""Codecs: how features are stored. A new precision is one class with `pack`, `unpack` and `layout`."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from unde.errors import UndeError, unknown

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Codec(ABC):
    """How features are stored. `columns` are those of each parameter, which may be scaled apart; rows stay rows.

    Attributes:
        rounding: Largest relative rounding of an entry beyond that of float32.
        mapped: Whether features are used as they are mapped, without a copy.
        lossy: Whether more than digits is lost, so that K g(n) cannot be stored in the same way.
    """

    rounding: ClassVar[float]
    mapped: ClassVar[bool] = False
    lossy: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The `store_dtype` of users."""

    @abstractmethod
    def layout(self, rows: int, columns: Sequence[slice]) -> Layout:
        """Shapes and types of the tensors that `pack` returns."""

    @abstractmethod
    def pack(self, features: Tensor, columns: Sequence[slice]) -> dict[str, Tensor]:
        """Tensors to store for float32 features (n, D), by name."""

    @abstractmethod
    def unpack(
        self, shard: Mapping[str, Tensor], columns: Sequence[slice], out: Tensor | None = None
    ) -> Tensor:
        """Features (n, D) in float32, of any of the rows; in `out` unless that is None."""

    def nbytes(self, rows: int, columns: Sequence[slice]) -> int:
        """Bytes of the tensors that `pack` returns."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.layout(rows, columns).values())

    def check(self, shard: Mapping[str, Tensor], rows: int, columns: Sequence[slice]) -> None:
        """Raise a ValueError unless the tensors are those of so many rows."""
        for name, (shape, dtype) in self.layout(rows, columns).items():
            if name not in shard:
                raise ValueError(f"{name!r} is not in it")
            actual = (tuple(shard[name].shape), shard[name].dtype)
            if actual != (shape, dtype):
                raise ValueError(f"{name!r} is {_describe(*actual)}, expected {_describe(shape, dtype)}")


class Float32(Codec):
    name: ClassVar[str] = "float32"
    dtype: ClassVar[torch.dtype] = torch.float32
    rounding: ClassVar[float] = 0.0
    mapped: ClassVar[bool] = True

    def layout(self, rows: int, columns: Sequence[slice]) -> Layout:
        return {"features": ((rows, columns[-1].stop), self.dtype)}

    def pack(self, features: Tensor, columns: Sequence[slice]) -> dict[str, Tensor]:
        return {"features": features.to(self.dtype)}

    def unpack(
        self, shard: Mapping[str, Tensor], columns: Sequence[slice], out: Tensor | None = None
    ) -> Tensor:
        if out is not None:
            return out.copy_(shard["features"])
        return shard["features"].to(torch.float32)  # float32 is handed on as it is mapped, without a copy


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

    def unpack(
        self, shard: Mapping[str, Tensor], columns: Sequence[slice], out: Tensor | None = None
    ) -> Tensor:
        return _scaled(super().unpack(shard, columns, out), torch.exp2(shard["exponent"].float()), columns)


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
        scale = _rounded_up(largest(features, columns, self.name), _STEPS, INT8_LARGEST, 7)
        numbers = torch.empty_like(features, dtype=self.dtype)
        for c, s in zip(columns, torch.where(scale > 0, scale, 1.0).unbind(1)):
            numbers[:, c] = (features[:, c] / s.unsqueeze(1)).round_().clamp_(-_STEPS, _STEPS)
        return {"features": numbers, "scale": scale}

    def unpack(
        self, shard: Mapping[str, Tensor], columns: Sequence[slice], out: Tensor | None = None
    ) -> Tensor:
        return _scaled(super().unpack(shard, columns, out), shard["scale"], columns)

    def check(self, shard: Mapping[str, Tensor], rows: int, columns: Sequence[slice]) -> None:
        super().check(shard, rows, columns)
        check_scales(shard["scale"], INT8_LARGEST, what="parameter")


_STEPS = 127
INT8_LARGEST = 66052 * 2.0**105  # the largest scale of 17 bits that 127 times is in the range of float32


def _rounded_up(largest: Tensor, steps: int, most: float, zeros: int) -> Tensor:
    """A `steps`-th of the largest entries, rounded up so that the last `zeros` of the 24 bits of float32 are zero; 0
    where entries are too small to be told from it."""
    bits = (largest / steps).clamp(max=most).view(torch.int32)
    scale = ((bits + (2**zeros - 1)) & -(2**zeros)).view(torch.float32)
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(largest > tiny / 2, scale.clamp(min=tiny), 0.0)


def largest(features: Tensor, columns: Sequence[slice], name: str) -> Tensor:
    """(n, U) float32: the largest size of an entry. Raises if one is not finite."""
    sizes = _largest(features, columns).to(torch.float32)  # NaN if one is
    if not sizes.isfinite().all():
        first = int((~sizes.isfinite()).any(1).nonzero()[0])
        raise UndeError(
            f"features to be stored as {name} are NaN or infinite (row {first} of {len(sizes)}), expected finite "
            "numbers: look at the example and the model, or divide the loss by a constant and build again"
        )
    return sizes


def check_scales(scale: Tensor, most: float, at: slice = slice(None), what: str = "number") -> None:
    """A ValueError if one of (n, ·) is not finite, negative or too large; of those `at`, called `what`."""
    some = scale[:, at]
    if not some.numel():
        return
    least, largest = some.aminmax()  # NaN if one is
    if not (least >= 0 and largest <= most):
        wrong = ~((some >= 0) & (some <= most))
        row, unit = wrong.nonzero()[0].tolist()
        unit += at.start or 0
        raise ValueError(
            f"'scale' of row {row}, {what} {unit} is {float(scale[row, unit])}, expected a finite number that is not "
            "negative"
        )


def neighbours(kinds: Sequence[Any], together: bool = True) -> Iterator[tuple[Any, int, int]]:
    """Runs of equal ones: what they are, the first, and one past the last. Not `together`: one by one.

    >>> list(neighbours([4, 4, 1]))
    [(4, 0, 2), (1, 2, 3)]
    """
    first = 0
    for kind, run in itertools.groupby(kinds) if together else ((k, [k]) for k in kinds):
        last = first + len(list(run))
        yield kind, first, last
        first = last


def _largest(features: Tensor, columns: Sequence[slice]) -> Tensor:
    """(n, U): the largest size of an entry, NaN if one is. Read twice, which is faster than a copy of all sizes."""
    parts = list[Tensor]()
    for size, first, last in neighbours([c.stop - c.start for c in columns]):
        c = slice(columns[first].start, columns[last - 1].stop)
        each = features[:, c].unflatten(1, (last - first, size))
        parts.append(torch.maximum(each.amax(2), -each.amin(2)))
    return torch.cat(parts, 1)


def _scaled(features: Tensor, scale: Tensor, columns: Sequence[slice]) -> Tensor:
    """Each parameter's columns times its scale (n, U), in place; neighbours of one size together."""
    for size, first, last in neighbours([c.stop - c.start for c in columns]):
        c = slice(columns[first].start, columns[last - 1].stop)
        features[:, c].unflatten(1, (last - first, size)).mul_(scale[:, first:last].unsqueeze(2))
    return features


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {shape}"


CODECS: dict[str, Codec] = {c.name: c for c in (Float32(), Float16(), Int8())}


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
