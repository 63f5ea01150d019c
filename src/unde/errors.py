"""The one exception type of the package, and the wording shared by all its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UndeError(ValueError):
    """Bad input or a broken index. The message says what was wrong, what was expected and what to do."""


class BadExample(UndeError):
    """One example that cannot be used; it says nothing about the others."""


class NotRetrievable(UndeError):
    """Self-retrieval cannot be run on such training data."""


def unknown(kind: str, value: object, known: Iterable[str]) -> UndeError:
    """An error for a name that is not one of `known`, with the nearest one suggested.

    >>> print(unknown("method", "trac", ["trak", "tracin"]))
    unknown method 'trac': expected one of 'trak', 'tracin'. Did you mean 'tracin'?
    """
    names = list(known)
    nearest = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f". Did you mean {nearest[0]!r}?" if nearest else ""
    return UndeError(f"unknown {kind} {value!r}: expected one of {', '.join(map(repr, names))}{hint}")
