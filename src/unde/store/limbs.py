"""Products of few queries with what is stored in int8, of whole numbers: nothing is unpacked.

A query has 24 bits of its largest entry in each parameter, as three limbs of eight. Limbs times stored numbers are sums
of whole numbers, which processors make several times as fast as those of float32, and without rounding. What is
rounded is the query, each entry by 2⁻²³ of itself and 2⁻²⁴ of the largest at most, and the few sums of limbs and
parameters. So scores are as near to the exact ones as those of float32, and do not depend on how rows are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from unde.onednn import faster_by_onednn, times
from unde.store.codec import Codec, Int8
from unde.store.dequantize import Block, Packed, in_runs

_LIMBS = 3
_MOST = 127 * (2**16 + 2**8 + 1)  # what three limbs of -128 to 127 have on both sides of zero
_RANGE = 2.0**90  # largest entries between this and its inverse have products in range before they are scaled
_COLUMNS = 2**16  # so many products, of up to 255 × 128 while they are made, have sums in the range of int32
_SUMS = 2**19  # that are made together, so that they stay in the processor's cache
_ROWS = 512  # fewer take longer to begin than to multiply
_WIDE = 1024  # columns of a parameter on average: where there are fewer, to unpack takes less time
_FEW = 16  # queries: for more, to multiply in float32 takes longer than to unpack, and three products longer than one


@dataclass(frozen=True, eq=False)
class Limbs:
    """Queries as whole numbers, parameter by parameter."""

    units: Sequence[tuple[int, slice]]  # whose scale, and columns
    limbs: Sequence[Tensor]  # of each (3, q, columns) int8, the highest first
    sizes: Tensor  # (units, q, 1): what a whole one is

    def __len__(self) -> int:
        return self.sizes.shape[1]

    def __getitem__(self, queries: slice) -> Limbs:
        return Limbs(self.units, [x[:, queries] for x in self.limbs], self.sizes[:, queries])

    def add(self, out: Tensor, block: Packed) -> None:
        """Adds products (q, n) with the rows of a block to `out`."""
        rows = _at_once(len(self))
        for start in range(0, len(block), rows):
            here = slice(start, min(start + rows, len(block)))
            self._add(out[:, here], block.shard["features"][here], block.shard["scale"][here])

    def _add(self, out: Tensor, numbers: Tensor, scale: Tensor) -> None:
        q, n = out.shape
        together = min(len(self.units), max(1, _SUMS // (_LIMBS * q * n)))
        sums = torch.empty(together, _LIMBS * q, n, dtype=torch.int32)
        whole = torch.empty(together, _LIMBS, q, n)
        for first in range(0, len(self.units), together):
            some = slice(first, min(first + together, len(self.units)))
            count = some.stop - first
            for (_, c), limbs, found in zip(self.units[some], self.limbs[some], sums):
                torch._int_mm(limbs.flatten(0, 1), numbers[:, c].T, out=found)
            high, middle, low = whole[:count].copy_(sums[:count].view(count, _LIMBS, q, n)).unbind(1)
            low.add_(middle, alpha=2**8).add_(high, alpha=2**16).mul_(self.sizes[some])
            scales = scale[:, [u for u, _ in self.units[some]]].T.unsqueeze(1)
            for product, by in zip(low, scales):  # in this order, however many are made together
                out.addcmul_(product, by)


@dataclass(frozen=True, eq=False)
class Factor:
    """Queries (q, D) that are multiplied with blocks, each as it is stored."""

    queries: Tensor
    columns: Sequence[slice]

    @cached_property
    def limbs(self) -> Limbs | None:
        """None where products of float32 are as fast, or nearer."""
        if not _used(len(self.queries), self.columns):
            return None
        units = _units(self.columns)
        largest = torch.stack([self.queries[:, c].abs().amax(1, keepdim=True) for _, c in units])
        if not ((largest == 0) | ((largest > 1 / _RANGE) & (largest < _RANGE))).all():
            return None
        sizes = torch.where(largest > 0, largest, 1.0)
        limbs = [_cut(self.queries[:, c] / size) for (_, c), size in zip(units, sizes)]
        return Limbs(units, limbs, largest / _MOST)

    def multiply(self, out: Tensor, queries: slice, block: Block, add: bool) -> None:
        """Puts the products (q, n) of some queries with a block into `out`, or adds them to it."""
        if isinstance(block, Packed) and isinstance(block.codec, Int8) and self.limbs is not None:
            self.limbs[queries].add(out if add else out.zero_(), block)
            return
        q = self.queries[queries]
        together = _together() if isinstance(block, Packed) else max(1, len(q))
        for rows, features in in_runs(block):
            if faster_by_onednn(q, features):
                for some, part in zip(q.split(together), out[:, rows].split(together)):
                    made = times(some, features)
                    part.add_(made) if add else part.copy_(made)
            else:
                out[:, rows].addmm_(q, features.T, beta=int(add))


def nbytes(codec: Codec, columns: Sequence[slice], rows: int, queries: int, together: int) -> tuple[int, int]:
    """Of the limbs of queries, and of sums that are made of some of them `together` with so many rows; zero where there
    are none."""
    if not (isinstance(codec, Int8) and _used(queries, columns)):
        return 0, 0
    sums = _LIMBS * together * min(rows, _at_once(together))
    return _LIMBS * queries * columns[-1].stop, 8 * sums * min(len(_units(columns)), max(1, _SUMS // sums))


def _used(queries: int, columns: Sequence[slice]) -> bool:
    return queries < _FEW and columns[-1].stop >= _WIDE * len(columns) and _exact()


def _units(columns: Sequence[slice]) -> list[tuple[int, slice]]:
    """Parameters, the longest in several parts."""
    return [
        (u, slice(a, min(a + _COLUMNS, c.stop)))
        for u, c in enumerate(columns)
        for a in range(c.start, c.stop, _COLUMNS)
    ]


def _cut(x: Tensor) -> Tensor:
    """(3, q, columns) of numbers from -1 to 1."""
    left, found = x.mul_(_MOST).round_().to(torch.int32), []
    for _ in range(_LIMBS):
        limb = ((left + 128) & 255) - 128
        left = (left - limb) >> 8
        found.append(limb.to(torch.int8))
    return torch.stack(found[::-1])


def _at_once(queries: int) -> int:
    """Rows that are multiplied together."""
    return max(_ROWS, _SUMS // (_LIMBS * max(1, queries)))


def _together() -> int:
    """Queries that are multiplied at once with rows that were unpacked. Of more of them oneDNN gives each thread some,
    and all rows: then the next rows take six times as long to unpack, into memory that several cores have cached."""
    return max(256, 128 * torch.get_num_threads())


@cache
def _exact() -> bool:
    """Whether this processor has instructions for such products, and they are what they should be. Without them
    products take longer than those of float32, and on some processors pairs of large ones are cut."""
    has = getattr(torch.cpu, "_is_vnni_supported", None)  # a name that torch may change
    if has is None or not has() or not torch.backends.mkldnn.is_available():
        return False
    return all(_exact_of(*shape) for shape in ((3, 5, 16), (3, 256, 600), (30, 64, 40), (300, 1000, 70)))


def _exact_of(rows: int, inner: int, columns: int) -> bool:
    """Numbers at the ends of their range, so that sums are as large as they can be."""
    ends = torch.tensor([-128, 127, -128, -127, 127, 127, 0], dtype=torch.int8)
    a = ends[torch.arange(rows).unsqueeze(1) * torch.arange(inner) % 7]
    b = ends[(torch.arange(columns).unsqueeze(1) + torch.arange(2 * inner) // 3) % 7]  # as rows are stored
    b = b.clamp(min=-127)[:, :inner]
    return torch.equal(torch._int_mm(a, b.T).double(), a.double() @ b.double().T)
