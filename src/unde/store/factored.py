"""Features as a few outer products: under a two-sided projection they are matrices, and nearly of low rank.

The gradient of a weight is a sum of outer products over the positions of an example. Of its feature, r rows by s
columns, the leading c singular pairs are kept, Σ_k u_k v_kᵀ with c (r + s) numbers in place of r s, as LoRIF does
(arXiv:2601.21929). No other c outer products come closer. Their entries take a byte each, and each product a scale.

c may be the same for all matrices, or each has its own: `choose_ranks` spends the bytes where they keep most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from unde.errors import UndeError, unknown
from unde.projection import MATRICES, MOST_FACTORS, Spec, two_sides
from unde.store.codec import (
    CODECS,
    INT8_LARGEST,
    Codec,
    Int8,
    Layout,
    check_scales,
    codec,
    largest,
    neighbours,
)

MatrixShape = tuple[int, int] | None  # of the feature of a parameter; None where it is a vector
AUTO = "auto"  # float32 or int8, by the size of the store
_SMALL = 64  # matrices with a side up to this are decomposed exactly
_OVERSAMPLED = 8  # directions more than are kept
_ITERATIONS = 2
_NEAR = 2.0**40
_STEPS = 127
_LARGEST = (1 - 2.0**-20) * 2.0**128 / _STEPS**2  # 127² times it is in the range of float32


@dataclass(frozen=True)
class Factored(Codec):
    """`rank` outer products of every matrix that they take less than int8 for; the others, and vectors, in int8.

    `features` has the numbers u_1 v_1 … u_c v_c of each matrix, and those of int8, in the order of the parameters;
    `scale` has c and 1 of them. `ranks` has another c for each parameter, 0 where nothing of a matrix is kept.
    """

    rounding: ClassVar[float] = Int8.rounding  # what is left out is no noise: kernels never see it
    lossy: ClassVar[bool] = True
    rank: int
    sides: tuple[MatrixShape, ...]  # of each parameter
    ranks: tuple[int, ...] = ()  # of each parameter; empty: `rank`

    @property
    def name(self) -> str:
        return f"factored({self.rank})"

    def layout(self, rows: int, columns: Sequence[slice]) -> Layout:
        runs = list(self._runs(columns))
        return {
            "features": ((rows, runs[-1].numbers.stop), torch.int8),
            "scale": ((rows, runs[-1].scales.stop), torch.float32),
        }

    def pack(self, features: Tensor, columns: Sequence[slice]) -> dict[str, Tensor]:
        sizes = largest(features, columns, self.name)
        kinds = self.layout(len(features), columns)
        out = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}
        for i, run in enumerate(self._runs(columns, together=False)):
            x = features[:, run.columns]
            if run.sides is None:
                numbers, scale = Int8().pack(x, [slice(0, run.size)]).values()
            else:
                numbers, scale = _factors(x, run, sizes[:, i : i + 1])
            out["features"][:, run.numbers], out["scale"][:, run.scales] = numbers, scale
        return out

    def unpack(
        self, shard: Mapping[str, Tensor], columns: Sequence[slice], out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = torch.empty(len(shard["features"]), columns[-1].stop, device=shard["features"].device)
        for run in self._runs(columns):
            numbers, scale = shard["features"][:, run.numbers], shard["scale"][:, run.scales]
            if run.sides is None:
                x = out[:, run.columns].unflatten(1, (run.units, run.size))
                torch.mul(numbers.unflatten(1, (run.units, run.size)), scale.unsqueeze(2), out=x)
                continue
            r, s = run.sides
            x = out[:, run.columns].unflatten(1, (run.units, r, s))
            if run.rank == 0:
                x.zero_()
                continue
            both = numbers.unflatten(1, (run.units, run.rank, r + s)).float()
            left = (both[..., :r] * scale.unflatten(1, (run.units, run.rank, 1))).unsqueeze(4)
            right = both[..., r:].unsqueeze(3)
            torch.mul(left[:, :, 0], right[:, :, 0], out=x)
            for k in range(1, run.rank):
                x.addcmul_(left[:, :, k], right[:, :, k])
        return out

    def check(self, shard: Mapping[str, Tensor], rows: int, columns: Sequence[slice]) -> None:
        super().check(shard, rows, columns)
        for run in self._runs(columns):
            check_scales(shard["scale"], INT8_LARGEST if run.sides is None else _LARGEST, run.scales)

    def _runs(self, columns: Sequence[slice], together: bool = True) -> Iterator[_MatrixRun]:
        """Parameters one by one, or neighbours that are stored alike `together`."""
        ranks = self.ranks or [self.rank] * len(columns)
        kinds = [
            (c.stop - c.start, *((None, 1) if pair is None or _is_whole(pair, rank) else (pair, rank)))
            for c, pair, rank in zip(columns, self.sides, ranks, strict=True)
        ]
        number = scale = 0
        for (size, pair, rank), first, last in neighbours(kinds, together):
            units, each = last - first, size if pair is None else rank * sum(pair)
            numbers = slice(number, number + units * each)
            scales = slice(scale, scale + units * rank)
            number, scale = numbers.stop, scales.stop
            where = slice(columns[first].start, columns[last - 1].stop)
            yield _MatrixRun(units, size, pair, rank, where, numbers, scales)


class _MatrixRun(NamedTuple):
    units: int
    size: int  # columns of each
    sides: MatrixShape  # of matrices that are kept as outer products
    rank: int  # scales of each: how many products, 1 of int8
    columns: slice
    numbers: slice
    scales: slice


def _factors(x: Tensor, run: _MatrixRun, size: Tensor) -> tuple[Tensor, Tensor]:
    """Of matrices (n, r·s) with entries up to `size` (n, 1): numbers (n, c·(r + s)) and scales (n, c)."""
    assert run.sides is not None
    if run.rank == 0:
        return x[:, :0].to(torch.int8), x[:, :0]
    matrices = x.to(torch.float32).unflatten(1, run.sides)
    tiny = torch.finfo(torch.float32).tiny
    size = torch.where(size > tiny, size, 1.0)
    if 1 / _NEAR < size.min() and size.max() < _NEAR:  # squares stay in range: no need of a copy
        size = torch.ones_like(size)
    else:
        matrices = matrices / size.unsqueeze(2)
    left, right = leading(matrices, run.rank)
    most = [f.abs().amax(1) for f in (left, right)]  # (n, c)
    scale = most[0] * most[1] * size / _STEPS**2
    scale = torch.where(scale >= tiny, scale.clamp(max=_LARGEST), 0.0)
    both = [f / torch.where(m > 0, m, 1.0).unsqueeze(1) * _STEPS for f, m in zip((left, right), most)]
    return torch.cat(both, 1).mT.round().to(torch.int8).flatten(1), scale


def _bytes(pair: tuple[int, int], rank: int) -> int:
    """Bytes of a matrix: those of its outer products, or of int8 where these are no fewer."""
    return min(rank * (sum(pair) + 4), pair[0] * pair[1] + 4)


def _is_whole(pair: tuple[int, int], rank: int) -> bool:
    return rank * (sum(pair) + 4) >= pair[0] * pair[1] + 4


def choose_ranks(
    rank: int, sides: Sequence[MatrixShape], energies: Sequence[Sequence[float]]
) -> tuple[int, ...]:
    """How many outer products to keep of each matrix: together no more bytes than `rank` of each, spent where they keep
    most.

    Args:
        rank: The c of factored(c).
        sides: Of each parameter; of vectors None.
        energies: Of each parameter the mean squares of its singular values, the largest first.

    >>> choose_ranks(1, [(8, 8), (8, 8), None], [[9.0, 4.0, 1.0], [2.0, 1.0, 0.0], []])
    (2, 0, 0)
    """
    left = sum(_bytes(pair, rank) for pair in sides if pair is not None)
    ranks = [0] * len(sides)
    gains = [
        (energy / (sum(pair) + 4), -i, -k)
        for i, (pair, each) in enumerate(zip(sides, energies, strict=True))
        if pair is not None
        for k, energy in enumerate(each)
    ]
    full = set[int]()  # matrices whose next product does not fit
    for _, i, k in sorted(gains, reverse=True):
        pair = sides[-i]
        assert pair is not None
        price = _bytes(pair, 1 - k) - _bytes(pair, -k)
        if -i in full or price > left:
            full.add(-i)
            continue
        ranks[-i], left = 1 - k, left - price
    return tuple(ranks)


def leading(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(n, r, c) and (n, s, c): the `rank` outer products whose sum is nearest to each of the matrices (n, r, s).

    Of small matrices, eigenvectors of the product of the smaller side, all of them at once, and what of the matrix lies
    along them. Of large ones, what subspace iteration finds from seeded directions: exact where a matrix has no higher
    rank.

    >>> m = torch.tensor([[[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]]])
    >>> left, right = leading(m, 1)
    >>> (left @ right.mT).round().abs()
    tensor([[[3., 0.],
             [0., 0.],
             [0., 0.]]])
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    m = matrices if wide else matrices.mT
    if m.shape[1] <= _SMALL or rank + _OVERSAMPLED >= m.shape[1]:
        vectors = _eigenvectors(m, rank)
        along = m.mT @ vectors
    else:
        basis = _subspace(m, rank + _OVERSAMPLED)  # (n, ·, k)
        within = basis.mT @ m  # (n, k, ·): what is left is thin
        vectors = _eigenvectors(within, rank)
        vectors, along = basis @ vectors, within.mT @ vectors
    return (vectors, along) if wide else (along, vectors)


def _eigenvectors(m: Tensor, rank: int) -> Tensor:
    """(n, r, c): the leading eigenvectors of m mᵀ, the largest first."""
    return torch.linalg.eigh(m @ m.mT).eigenvectors[:, :, -rank:].flip(2)


def _subspace(m: Tensor, k: int) -> Tensor:
    """(n, r, k): an orthonormal basis of about the k leading directions of the columns of m."""
    generator = torch.Generator().manual_seed(k)
    y = m @ torch.randn(m.shape[2], k, generator=generator).to(m)
    for _ in range(_ITERATIONS):
        y = m @ (m.mT @ torch.linalg.qr(y).Q)
    return torch.linalg.qr(y).Q


def sides_of(units: Sequence[Mapping[str, Any]], projection: str) -> tuple[MatrixShape, ...]:
    """Rows and columns of the features of parameters (name, shape, size) under a projection.

    >>> sides_of([{"shape": [64, 32], "size": 256}, {"shape": [64], "size": 64}], "kron(16)")
    ((16, 16), None)
    """
    spec = Spec.parse(projection)
    matrix = spec.kind in MATRICES
    sides = [two_sides(spec, tuple(u["shape"])) if matrix and len(u["shape"]) > 1 else None for u in units]
    return tuple(sides)


def codec_of(name: str, units: Sequence[Mapping[str, Any]], projection: str) -> Codec:
    """The codec of an index with these parameters.

    >>> units = [{"shape": [64, 32], "size": 256}, {"shape": [64], "size": 64}]
    >>> codec_of("factored(1)", units, "kron(16)").nbytes(1, [slice(0, 256), slice(256, 320)])
    104
    """
    rank = _rank(name)
    if rank is None:
        return codec(name)
    ranks = tuple(u.get("rank", rank) for u in units) if any("rank" in u for u in units) else ()
    return Factored(rank, sides_of(units, projection), ranks)


def check(name: str, projection: str) -> None:
    """Raise unless features under a projection can be stored so; factored(c) stores its own."""
    if name not in (AUTO, projection, *CODECS):
        raise unknown("store_dtype", name, (AUTO, *CODECS))


def resolve(name: str, projection: str) -> str:
    """The codec of features under a projection: factored(c) has its own, others are stored as `name` says.

    >>> resolve("auto", "factored(4)"), resolve("int8", "kron(16)")
    ('factored(4)', 'int8')
    """
    spec = Spec.parse(projection)
    if spec.kind != "factored":
        return name
    if name not in (AUTO, str(spec)):
        raise UndeError(
            f"store_dtype {name!r} with projection {str(spec)!r}, which keeps outer products in int8: leave "
            "store_dtype out, or use projection 'none'"
        )
    return str(spec)


def _rank(name: str) -> int | None:
    """c of factored(c); None of others."""
    match = re.fullmatch(r"factored\(([0-9]{1,3})\)", name) if isinstance(name, str) else None
    if match is None:
        return None
    if not 1 <= int(match[1]) <= MOST_FACTORS:
        raise UndeError(
            f"store_dtype {name!r}: expected 1 to {MOST_FACTORS} outer products, as in 'factored(1)'"
        )
    return int(match[1])
