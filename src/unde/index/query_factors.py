"""Queries of `unde.attribute` as a few outer products of each matrix: many large ones fit into memory together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unde import console
from unde.devices import CPU, Compute
from unde.errors import UndeError
from unde.store.factored import MatrixShape, leading

CG_VECTORS = 6  # conjugate gradients hold so many vectors for each query
QUERY_SHARE = 2  # gradients of queries take at most 1/2 of the memory budget
_PRODUCTS = 2**24  # numbers between two products, at most, or those of one query


class _Part(NamedTuple):
    columns: slice  # of a gradient
    held: slice  # of what is held of a query
    sides: MatrixShape


@dataclass(frozen=True)
class QueryFactors:
    """Of each matrix of a preconditioned query the `rank` outer products that come closest; vectors are whole.

    Args:
        rank: How many; a matrix that they take no fewer numbers for is whole.
        units: The parameters, as a manifest lists them.
    """

    rank: int
    units: Sequence[Mapping[str, Any]]

    def parts(self) -> Iterator[_Part]:
        """The parameters in their order."""
        column = number = 0
        for u in self.units:
            size, rows = u["size"], u["shape"][0]
            sides = (rows, size // rows) if len(u["shape"]) > 1 else None
            if sides is not None and self.rank * sum(sides) >= size:
                sides = None
            each = size if sides is None else self.rank * sum(sides)
            yield _Part(slice(column, column + size), slice(number, number + each), sides)
            column, number = column + size, number + each

    @property
    def width(self) -> int:
        """Numbers that are held of a query."""
        return [part.held.stop for part in self.parts()][-1]

    def pack(self, queries: Tensor) -> Tensor:
        """(q, ·): what is held of queries (q, D)."""
        out = queries.new_empty(len(queries), self.width)
        for columns, held, sides in self.parts():
            x = queries[:, columns]
            if sides is not None:
                x = torch.cat(leading(x.unflatten(1, sides), self.rank), 1).mT.flatten(1)
            out[:, held] = x
        return out

    def error(self, queries: Tensor, held: Tensor, features: Tensor) -> Tensor:
        """(2,) sums of squares: of what scores of gradients (n, D) are off by, and of the scores."""
        exact = features @ queries.T
        found = self.products(held, features, [0] * len(self.units), features.new_zeros(1, *exact.shape))[0]
        return torch.stack([(found - exact).square().sum(), exact.square().sum()])

    def products(self, held: Tensor, features: Tensor, groups: Sequence[int], out: Tensor) -> Tensor:
        """Add the products of gradients (n, D) with what is held (Q, ·) to `out` (M, n, Q); one group a parameter."""
        for j, (columns, where, sides) in zip(groups, self.parts()):
            if sides is None:
                out[j].addmm_(features[:, columns], held[:, where].T)
                continue
            matrices = features[:, columns].unflatten(1, sides)
            step = max(1, _PRODUCTS // (self.rank * len(features) * sides[0]))
            for q in range(0, len(held), step):
                left, right = held[q : q + step, where].unflatten(1, (self.rank, -1)).split(list(sides), 2)
                along = matrices @ right.flatten(0, 1).T  # (n, R, q·k)
                each = (along * left.flatten(0, 1).T).sum(1)
                out[j][:, q : q + step] += each.unflatten(1, (-1, self.rank)).sum(2)
        return out


def check_rank(rank: int | None) -> None:
    """Raise unless it is a number of outer products, or None."""
    if rank is not None and rank < 1:
        raise UndeError(
            f"query_rank={rank}: expected a number of outer products, such as 16, or None for whole queries"
        )


def queries_in_memory(parameters: int, cg: int, there: Compute) -> int:
    """How many queries are held at once; raises unless it is one, at least."""
    each = 4 * parameters * (CG_VECTORS if cg else 1)
    if step := there.memory // QUERY_SHARE // each:
        return step
    option = "memory=" if there.device == CPU else "device_memory="
    what = (
        f"the {CG_VECTORS} vectors that cg={cg} holds for one query take"
        if cg
        else "the gradient of one query takes"
    )
    raise UndeError(
        f"{what} {console.size(each)} ({parameters:,} parameters), and the memory budget has "
        f"{console.size(there.memory // QUERY_SHARE)} for them: raise {option}, leave parameters out with exclude=, or "
        "build an index"
    )
