"""Known contributors: letters on the training examples that are known to have given a query something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from unde.data import to_numpy
from unde.errors import UndeError
from unde.markup import Html, mark

_PAPERS = {"subject": "P"}  # the paper's letter: S is for style


@dataclass(frozen=True)
class Mark:
    """A letter on a training example, and what the example is known to have contributed to the query.

    >>> Mark("P", "subject").letter
    'P'
    """

    letter: str
    contribution: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.letter) <= 2:
            raise UndeError(
                f"the mark {self.letter!r} of {self.contribution!r}: expected one letter, or two at most"
            )

    def html(self) -> Html:
        return mark(
            "known", self.letter, self.contribution, f"known contributor to the query’s {self.contribution}"
        )


def marks_for(names: Iterable[str]) -> dict[str, Mark]:
    """A mark for each kind of contributor: the first letter of its name that is still free.

    >>> [m.letter for m in marks_for(["subject", "style", "background", "brush"]).values()]
    ['P', 'S', 'B', 'R']
    """
    made: dict[str, Mark] = {}
    for name in names:
        taken = {m.letter for m in made.values()}
        wanted = [_PAPERS.get(name, ""), *(c for c in name.upper() if c.isalnum()), *map(str, range(1, 10))]
        made[name] = Mark(next((c for c in wanted if c and c not in taken), "?"), name)
    return made


def legend_of(marks: Iterable[Mark]) -> list[Mark]:
    """Each mark once, by name; a letter that stands for two things is an error."""
    known: dict[str, Mark] = {}
    for each in marks:
        other = known.setdefault(each.letter, each)
        if other != each:
            raise UndeError(
                f"the mark {each.letter!r} stands for {other.contribution!r} and for {each.contribution!r} on one "
                "page: give each its own letter"
            )
    return sorted(known.values(), key=lambda each: each.contribution)


def checked(contributors: Mapping[str, object], shape: tuple[int, ...], of: str) -> dict[str, np.ndarray]:
    """The flags of each kind of contributor as bool arrays of one shape; `of` says what that shape is."""
    made = {}
    for name, flags in contributors.items():
        array = to_numpy(flags)
        if array.shape != shape or not np.isin(array, (0, 1)).all():
            raise UndeError(
                f"the contributors {name!r} are {array.dtype} of shape {array.shape}: expected true or false for {of}, "
                f"{shape}"
            )
        made[name] = array.astype(bool)
    return made
