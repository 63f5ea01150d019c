"""Codecs: features as they are stored. A new precision is one class with `pack`, `unpack` and `nbytes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from unde.errors import unknown


class Codec(Protocol):
    """`columns` are those of each parameter, which may be scaled apart."""

    name: ClassVar[str]
    rounding: ClassVar[float]  # of an entry, relative and at most, beyond that of float32

    def pack(self, features: Tensor, columns: Sequence[slice]) -> dict[str, Tensor]:
        """What is stored of float32 features (n, D), by name."""
        ...

    def unpack(self, shard: Mapping[str, Tensor], columns: Sequence[slice]) -> Tensor:
        """(n, D) float32 again."""
        ...

    def nbytes(self, rows: int, columns: Sequence[slice]) -> int:
        """Bytes of what `pack` gives."""
        ...


class Float32:
    name: ClassVar[str] = "float32"
    dtype: ClassVar[torch.dtype] = torch.float32
    rounding: ClassVar[float] = 0.0

    def pack(self, features: Tensor, columns: Sequence[slice]) -> dict[str, Tensor]:
        return {"features": features.to(self.dtype)}

    def unpack(self, shard: Mapping[str, Tensor], columns: Sequence[slice]) -> Tensor:
        return shard["features"].to(torch.float32)  # float32 is handed on as it is mapped, without a copy

    def nbytes(self, rows: int, columns: Sequence[slice]) -> int:
        return rows * columns[-1].stop * self.dtype.itemsize


class BFloat16(Float32):
    name: ClassVar[str] = "bfloat16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    rounding: ClassVar[float] = 2.0**-8


class Float16(Float32):
    """float16 spans 12 decades only, gradients more. So each example keeps a power of two for each parameter that
    lifts its largest entry there just below the largest float16, and rounds as float32 would, to 11 bits."""

    name: ClassVar[str] = "float16"
    dtype: ClassVar[torch.dtype] = torch.float16
    rounding: ClassVar[float] = 2.0**-11

    def pack(self, features: Tensor, columns: Sequence[slice]) -> dict[str, Tensor]:
        largest = torch.stack([features[:, c].abs().amax(1) for c in columns], 1)  # (n, U)
        exponent = (torch.frexp(largest).exponent - 15).clamp(-126, 126).to(torch.int8)
        scaled = torch.empty_like(features, dtype=self.dtype)
        for c, e in zip(columns, torch.exp2(-exponent.float()).unbind(1)):
            scaled[:, c] = features[:, c] * e.unsqueeze(1)
        return {"features": scaled, "exponent": exponent}

    def unpack(self, shard: Mapping[str, Tensor], columns: Sequence[slice]) -> Tensor:
        features = super().unpack(shard, columns)
        for c, e in zip(columns, torch.exp2(shard["exponent"].float()).unbind(1)):
            features[:, c] *= e.unsqueeze(1)
        return features

    def nbytes(self, rows: int, columns: Sequence[slice]) -> int:
        return super().nbytes(rows, columns) + rows * len(columns)


CODECS: dict[str, Codec] = {c.name: c for c in (Float32(), Float16(), BFloat16())}


def codec(name: str) -> Codec:
    """
    >>> codec("float16").nbytes(10, [slice(0, 3), slice(3, 4)])
    100
    """
    if name not in CODECS:
        raise unknown("store_dtype", name, CODECS)
    return CODECS[name]
