"""Pieces of one whole: a document of several training examples, a query of several sequences.

A score says how much a training example lowered the loss of a query, and such influences add up: the score of a
document is the sum over its pieces, that of a query which was cut the sum over the parts of its loss. So documents are
ranked by the sums of the scores of their pieces, after `final` and with weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unde.errors import UndeError


@dataclass(frozen=True, eq=False)
class Pieces:
    """The whole that each of n rows is a piece of, by number, and the names of the wholes."""

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
        """The end of each whole in `order`."""
        return torch.bincount(self.of, minlength=len(self.names)).cumsum(0).tolist()


def documents(ids: Iterable[Any]) -> Pieces:
    """Documents from ids such as "speech-3:2", piece 2 of speech-3, which indexes of texts have.

    Pieces of a document follow one another, with growing numbers, some of which may be missing. Anything else begins
    another document, even of the same name.

    Args:
        ids: Ids of the training examples, `index.ids`.

    Returns:
        The document of each example, for `scores.top(k, by=…)`.

    Raises:
        UndeError: If the ids do not name pieces of documents.

    >>> pieces = documents(["a:1", "a:3", "b:1", "a:1"])
    >>> pieces.of, pieces.names
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


Names = Pieces | Sequence[Any]


def name_pieces(names: Pieces | Sequence[Any], count: int, what: str) -> Pieces:
    """Rows of equal names as pieces of one whole; wholes are numbered in order of first appearance.

    >>> name_pieces(["a", "b", "a"], 3, "training examples").of
    tensor([0, 1, 0])
    """
    if not isinstance(names, Pieces):
        if isinstance(names, str) or not hasattr(names, "__len__"):
            raise UndeError(
                f"expected a list with a name for each of the {what}, got {names!r}; names of columns go with --by on "
                "the command line"
            )
        plain = [n.item() if hasattr(n, "item") else n for n in names]
        number: dict[Any, int] = {}
        of = [number.setdefault(name, len(number)) for name in plain]
        names = Pieces(torch.tensor(of, dtype=torch.int64), list(number))
    if len(names.of) != count:
        raise UndeError(f"{len(names.of)} names for {count} {what}: expected one for each")
    return names
