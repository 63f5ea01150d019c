"""The one exception type of the package, and the wording shared by all its messages."""

from __future__ import annotations

import difflib
from collections.abc import Generator, Iterable
from contextlib import contextmanager


class UndeError(ValueError):
    """Bad input or a broken index. The message says what was wrong, what was expected and what to do."""


class BadExample(UndeError):
    """One example that cannot be used; it says nothing about the others."""


class OtherIndex(UndeError):
    """A folder holds an index of other inputs, other settings, or another release."""


def unknown(kind: str, value: object, known: Iterable[str]) -> UndeError:
    """An error for a name that is not one of `known`, with the nearest one suggested.

    >>> print(unknown("method", "trac", ["trak", "tracin"]))
    unknown method 'trac': expected one of 'trak', 'tracin'. Did you mean 'tracin'?
    """
    names = list(known)
    nearest = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f". Did you mean {nearest[0]!r}?" if nearest else ""
    return UndeError(f"unknown {kind} {value!r}: expected one of {', '.join(map(repr, names))}{hint}")


@contextmanager
def explain(message: str, *errors: type[Exception]) -> Generator[None]:
    """Raise an UndeError in place of `errors`, with {e}, its {kind} and the {why} of the system in the message.

    An UndeError passes, unless it is one of the `errors`; a store that does not answer always does.

    >>> with explain("no number ({e})", ValueError):
    ...     float("x")
    Traceback (most recent call last):
    unde.errors.UndeError: no number (could not convert string to float: 'x')
    """
    try:
        yield
    except errors as e:
        if isinstance(e, UndeError) and (isinstance(e, OSError) or UndeError not in errors):
            raise
        why = getattr(e, "strerror", None) or e
        kind = type(e).__name__
        text = str(e) if isinstance(e, UndeError) else str(e).strip().partition("\n")[0] or kind
        for name, value in {"{e}": text, "{kind}": kind, "{why}": why}.items():
            message = message.replace(name, str(value))
        raise UndeError(message) from e


def require_positive(**values: float | None) -> None:
    """Raise unless counts are at least 1; None is for what is not set."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise UndeError(f"{name} is {value}: expected at least 1")
