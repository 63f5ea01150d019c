"""Pieces of one whole: a document of several training examples, a query of several sequences.

A score says how much a training example has lowered the loss of a query, and such influences add up: that of a
document is the sum over its pieces, that on a query which was cut the sum over the parts of its loss. So documents are
ranked by the sums of the scores of their pieces, after `final` and with weights, as every piece would be alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.scoring.range_checks import finite

SHARE = 8  # sums, and scores that are added to them, take at most one in so many of the memory budget each


@dataclass(frozen=True, eq=False)
class Pieces:
    """Which whole each of n rows is a piece of, by number, and what the wholes are called."""

    of: Tensor  # (n,)
    names: list[Any]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def whole(self) -> bool:
        """Whether nothing is in pieces."""
        return len(self.names) == len(self.of)

    def rows(self, number: int) -> list[int]:
        """The pieces of one whole, in order."""
        start, stop = self.ends[number - 1] if number else 0, self.ends[number]
        return self.order[start:stop].tolist()

    @cached_property
    def order(self) -> Tensor:
        """All rows, those of the first whole first."""
        return torch.argsort(self.of, stable=True)

    @cached_property
    def ends(self) -> list[int]:
        """Where in `order` each whole ends."""
        return torch.bincount(self.of, minlength=len(self.names)).cumsum(0).tolist()


def documents(ids: Iterable[Any]) -> Pieces:
    """The documents of ids such as "speech-3:2", piece 2 of speech-3, as indexes of texts have them.

    Pieces of a document follow one another, with growing numbers, some of which may be missing. Where they do not,
    another document begins, even of the same name.

    >>> found = documents(["a:1", "a:3", "b:1", "a:1"])
    >>> found.of, found.names
    (tensor([0, 0, 1, 2]), ['a', 'b', 'a'])
    """
    of, names, last, odd = [], list[str](), 0, None
    for i in ids:
        name, colon, part = str(i).rpartition(":")
        if not colon or not (part.isascii() and part.isdigit()):
            odd = i if odd is None else odd
            name, part = str(i), "1"
        if not names or name != names[-1] or int(part) <= last:
            names.append(name)
        last = int(part)
        of.append(len(names) - 1)
    if odd is not None and len(names) == len(of):
        raise UndeError(
            f"the ids do not say which document an example is a piece of (one is {odd!r}): expected ids such as "
            "'document:piece', or in Python the name of its document for each example, scores.top(10, by=names)"
        )
    return Pieces(torch.tensor(of, dtype=torch.int64), names)


def named(names: Pieces | Sequence[Any], count: int, what: str) -> Pieces:
    """Rows of equal names as pieces of one; wholes are numbered in the order in which they are first met.

    >>> named(["a", "b", "a"], 3, "training examples").of
    tensor([0, 1, 0])
    """
    if not isinstance(names, Pieces):
        if isinstance(names, str) or not hasattr(names, "__len__"):
            raise UndeError(f"a name for each of the {what} was expected, there is a {type(names).__name__}")
        plain = [n.item() if hasattr(n, "item") else n for n in names]
        number: dict[Any, int] = {}
        of = [number.setdefault(name, len(number)) for name in plain]
        names = Pieces(torch.tensor(of, dtype=torch.int64), list(number))
    if len(names.of) != count:
        raise UndeError(f"{len(names.of)} names for {count} {what}: expected one for each")
    return names


class Summable(Protocol):
    """Scores that can be made of some of the queries alone."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def memory(self) -> int: ...

    def picked(self, queries: Tensor) -> Any: ...


def sums(
    scores: Summable, w: Tensor, queries: Pieces, train: Pieces | None, skipped: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """(wholes among the queries, (q, D) sums of their scores with each of the D documents), as many as memory holds.

    Added up in float64, in the order of pieces. Training examples that were skipped add nothing.
    """
    examples, most = scores.shape[1], scores.memory // SHARE
    columns = examples if train is None else len(train)
    ends = [0, *queries.ends]
    step, at_once = max(1, most // (8 * columns)), max(1, most // (12 * examples))
    for start in range(0, len(queries), step):
        stop = min(start + step, len(queries))
        out = torch.zeros(columns, stop - start, dtype=torch.float64)
        for some in queries.order[ends[start] : ends[stop]].split(at_once):
            part = scores.picked(some).total(w).masked_fill_(skipped, 0.0).T.double()  # (N, q)
            if train is not None:
                part = torch.zeros(columns, len(some), dtype=torch.float64).index_add_(0, train.of, part)
            out.index_add_(1, queries.of[some] - start, part)
        yield slice(start, stop), finite(out.T.float(), "scores")
