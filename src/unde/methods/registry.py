"""Methods by their names and descriptions; which of them fit an index."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from unde.errors import UndeError, unknown
from unde.methods import custom as own_methods
from unde.methods.base import LATER, OWN, Method
from unde.methods.builtin import AUTO, METHODS, Damped, Fisher, TracIn
from unde.methods.elsewhere import Elsewhere
from unde.setup import imported

PROJECTION = "kron(16)"
_SHORT = {"tracin-cosine": TracIn(cosine=True)}
NAMES = (*METHODS, *_SHORT)  # that `parse` knows


def parse(method: str | Method | dict[str, Any]) -> Method:
    """A method from its short name, its description, or itself; MODULE:NAME is one of your own, or its class.

    >>> parse("trak")
    TRAK(projection=None, damping='auto', relative=True, form='auto', fisher='auto')
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, dict):
        return _described(method)
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]()
    if isinstance(method, str) and method in _SHORT:
        return _SHORT[method]
    if isinstance(method, str) and ":" in method:
        found = imported(method)
        found = found() if isinstance(found, type) and issubclass(found, Method) else found
        if not isinstance(found, Method):
            raise UndeError(
                f"{method} is a {type(found).__name__}: expected an unde.methods.Method, or a class of them"
            )
        return found
    raise unknown("method", method, NAMES)


def _described(description: dict[str, Any]) -> Method:
    fields = dict(description)
    name, own = fields.pop("name", None), fields.pop(OWN, None)
    kind: type[Method] | None
    known = METHODS | {Fisher.name: Fisher}
    if own is None:
        if not isinstance(name, str) or name not in known:
            raise unknown("method", name, METHODS)
        kind = known[name]
    else:
        own_methods.check_recorded(name, own)
        kind = own_methods.found(own["class"], Method)
    try:
        if any(isinstance(value, (list, dict)) for value in fields.values()):
            raise TypeError("expected numbers and names")
        if kind is None:
            return Elsewhere(fields.get("projection"), description)
        later = {f.name: f.metadata[LATER] for f in dataclasses.fields(kind) if LATER in f.metadata}
        made = kind(**(later | fields))
    except TypeError as e:
        raise UndeError(f"{name!r} cannot be made from {fields}: {e}") from None
    if own is not None and made.describe().get(OWN) != own:
        raise UndeError(
            f"{own['class']} is not what it was when the index was built: it had measure {own['measure']!r}, beside "
            f"{own['beside']} and {own['steps']} steps, now {made.measure!r}, {list(made.beside)} and {made.steps}. "
            "Give the changed one another name, and build another index"
        )
    return made


def for_building(
    method: str | Method,
    kind: str = "",
    recorded: dict[str, Any] | None = None,
    projection: str = PROJECTION,
) -> Method:
    """The method to build an index for, with its projection and its damping settled.

    Args:
        method: What is asked for.
        kind: Of the task, see `unde.tasks.identity.kind_of`.
        recorded: The method of an index that was begun: what is not named stays as it was settled then.
        projection: The one of methods that name none.
    """
    chosen = parse(method)
    before = parse(recorded) if recorded is not None and recorded.get("name") == chosen.name else None
    chosen = _with_projection(chosen, projection if before is None else before.projection)
    if isinstance(chosen, Damped) and isinstance(before, Damped):
        if chosen.damping == AUTO:
            chosen = replace(chosen, damping=before.damping, relative=before.relative)
        if getattr(chosen, "fisher", None) == AUTO:
            chosen = replace(chosen, fisher=before.labels)
    chosen = chosen.resolve(kind)
    if OWN in chosen.describe() and not isinstance(chosen, Elsewhere):
        own_methods.check(chosen)
        if _described(chosen.describe()) != chosen:
            raise UndeError(
                f"{chosen} does not come back from its description {chosen.describe()}: all that makes up a method of "
                "your own must be in the fields of its dataclass"
            )
    return chosen


def _with_projection(method: Method, projection: str | None) -> Method:
    if method.projection:
        return method
    try:
        return replace(method, projection=projection)
    except TypeError as e:
        raise UndeError(
            f"{type(method).__name__} cannot be given a projection ({e}): write a method of your own as a "
            "@dataclass(frozen=True) whose settings are fields"
        ) from None


def on_index(method: str | Method | None, built: Method, kind: str = "", examples: int = 1) -> Method:
    """The method to score with on an index built for `built`, whose projection it takes if it names none.

    `kind` is that of the task, by which damping="auto" is a number; `examples` are those of the index.
    """
    if method is None:
        return built
    method = _with_projection(parse(method), built.projection).resolve(kind, built, examples)
    if OWN in method.describe():
        own_methods.check(method)
    if method.steps != built.steps:
        raise UndeError(
            f"{method} needs the features of {method.steps} steps, the index holds {built.steps}: build another index"
        )
    if (method.measure, method.projection) != (built.measure, built.projection):
        raise UndeError(
            f"{method} differentiates {method.measure!r} under {method.projection}, but the index holds "
            f"{built.measure!r} under {built.projection}: build another index, or choose a method like it"
        )
    return method
