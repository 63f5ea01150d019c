"""Methods and kernels of the user's own: how an index names them, and whether they can go where they must.

An index records a method by the importable name of its class and the values of its fields. When it is opened the class
is looked up among what is imported already: a file that somebody else wrote must not choose what is run.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from unde.errors import UndeError
from unde.kernels.fingerprint import described

T = TypeVar("T")
_STEPS = 2**16
_BESIDE = 64  # measures, at most


def name_of(cls: type) -> str:
    """MODULE:NAME, by which the class is found again.

    >>> import collections
    >>> name_of(collections.Counter)
    'collections:Counter'
    """
    name = f"{cls.__module__}:{cls.__qualname__}"
    if found(name, object) is not cls:
        where = (
            "inside a function"
            if "<locals>" in cls.__qualname__
            else f"not as {cls.__qualname__} of {cls.__module__}"
        )
        raise UndeError(
            f"the method {cls.__name__} is defined {where}, so that an index could not name it: define the class at "
            "the top of a module"
        )
    return name


def found(name: str, base: type[T]) -> type[T] | None:
    """The class of that name, of a kind, if its module is imported."""
    module, _, path = name.partition(":")
    thing: Any = sys.modules.get(module)
    for part in path.split("."):
        thing = getattr(thing, part, None)
    return thing if isinstance(thing, type) and issubclass(thing, base) else None


def check_recorded(name: Any, own: Any) -> None:
    """Raises unless this could be what `Method.describe` wrote of a method of somebody's own."""
    good = (
        isinstance(name, str)
        and isinstance(own, Mapping)
        and set(own) == {"class", "measure", "beside", "steps"}
    )
    good = good and all(isinstance(own[k], str) for k in ("class", "measure")) and ":" in own["class"]
    good = good and type(own["steps"]) is int and 1 <= own["steps"] <= _STEPS
    good = good and isinstance(own["beside"], list) and len(own["beside"]) <= _BESIDE
    if not (good and all(isinstance(measure, str) for measure in own["beside"])):
        raise UndeError(f"the method {str(name)[:80]!r} is not described as methods are: {str(own)[:200]}")


def check(method: Any) -> None:
    """Raises for a method of one's own that an index could not hold on to, in one sentence."""
    what = type(method).__name__
    for name, value in asdict(method).items():
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise UndeError(
                f"{name} of the method {what} is a {type(value).__name__}: expected numbers and names, which an index "
                "can record"
            )
    described(method.kernel, what)


def check_travels(method: Any) -> None:
    """Raises for a method of one's own that other processes could not import."""
    what = type(method).__name__
    parts = (method, method.kernel)
    out = [type(part) for part in parts if type(part).__module__ == "__main__"]
    why = f"{out[0].__name__} is defined in the script or notebook that runs" if out else ""
    if not why:
        try:
            pickle.dumps(parts)
        except Exception as e:  # whatever the objects in it raise
            why = f"{type(e).__name__}: {e}"
    if why:
        raise UndeError(
            f"the method {what} cannot be sent to other processes ({why}): define it, and its kernel, at the top of a "
            "module that they can import, or use executor='serial'"
        )
