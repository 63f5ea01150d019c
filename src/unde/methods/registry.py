"""Methods by name and by description, and the method to build or score an index with."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from unde.errors import UndeError, unknown
from unde.methods.base import CUSTOM, OMIT_IF, Method, find_class
from unde.methods.builtin import AUTO, EKFAC, TRAK, Damped, Fisher, LoGRA, TracIn
from unde.methods.custom import UnimportedMethod, check_description, check_method
from unde.methods.diffusion import DAS, DTRAK, JourneyTRAK
from unde.setup import import_target

METHODS: dict[str, type[Method]] = {m.name: m for m in (TracIn, TRAK, LoGRA, EKFAC, DTRAK, JourneyTRAK, DAS)}
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
    if isinstance(method, type) and issubclass(method, Method):
        raise UndeError(
            f"method is the class {method.__name__}: pass an object, such as unde.methods.{method.__name__}(), or a "
            "name, such as 'trak'"
        )
    if isinstance(method, dict):
        return _from_description(method)
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]()
    if isinstance(method, str) and method in _SHORT:
        return _SHORT[method]
    if isinstance(method, str) and ":" in method:
        target = import_target(method)
        target = target() if isinstance(target, type) and issubclass(target, Method) else target
        if not isinstance(target, Method):
            raise UndeError(
                f"{method} is a {type(target).__name__}: expected an unde.methods.Method, or a class of them"
            )
        return target
    raise unknown("method", method, NAMES)


def _from_description(description: dict[str, Any]) -> Method:
    fields = dict(description)
    name, custom = fields.pop("name", None), fields.pop(CUSTOM, None)
    kind: type[Method] | None
    known = METHODS | {Fisher.name: Fisher}
    if custom is None:
        if not isinstance(name, str) or name not in known:
            raise unknown("method", name, METHODS)
        kind = known[name]
    else:
        check_description(name, custom)
        kind = find_class(custom["class"], Method)
    try:
        if any(isinstance(value, (list, dict)) for value in fields.values()):
            raise TypeError("expected numbers and names")
        if kind is None:
            return UnimportedMethod(fields.get("projection"), description)
        defaults = {f.name: f.metadata[OMIT_IF] for f in dataclasses.fields(kind) if OMIT_IF in f.metadata}
        method = kind(**(defaults | fields))
    except TypeError as e:
        raise UndeError(f"{name!r} cannot be made from {fields}: {e}") from None
    if custom is not None and (now := method.describe().get(CUSTOM)) != custom:
        raise UndeError(
            f"{custom['class']} is not what it was when the index was built: it was {custom}, now {now}. Give the "
            "changed one another name, and build another index"
        )
    return method


def for_building(
    method: str | Method,
    kind: str = "",
    recorded: dict[str, Any] | None = None,
    projection: str = PROJECTION,
) -> Method:
    """The method to build an index for, with its projection and its damping resolved.

    Args:
        method: What is asked for.
        kind: Of the task, see `unde.tasks.base.kind_of`.
        recorded: The method of an index that was begun: what is not named stays as it was settled then.
        projection: The one of methods that name none.
    """
    chosen = parse(method)
    before = parse(recorded) if recorded is not None and recorded.get("name") == chosen.name else None
    chosen = with_projection(chosen, projection if before is None else before.projection)
    if isinstance(chosen, Damped) and isinstance(before, Damped):
        if chosen.damping == AUTO:
            chosen = replace(chosen, damping=before.damping, relative=before.relative)
        if getattr(chosen, "fisher", None) == AUTO:
            chosen = replace(chosen, fisher=before.labels)
    chosen = chosen.resolve(kind)
    if CUSTOM in chosen.describe() and not isinstance(chosen, UnimportedMethod):
        check_method(chosen)
        if _from_description(chosen.describe()) != chosen:
            raise UndeError(
                f"{chosen} does not come back from its description {chosen.describe()}: all that makes up a method of "
                "your own must be in the fields of its dataclass"
            )
    return chosen


def with_projection(method: Method, projection: str | None) -> Method:
    """The method under a projection, unless it names one."""
    if method.projection:
        return method
    try:
        return replace(method, projection=projection)
    except TypeError as e:
        raise UndeError(
            f"{type(method).__name__} cannot be given a projection ({e}): write a method of your own as a "
            "@dataclass(frozen=True) whose settings are fields"
        ) from None


def _labels(method: Method) -> str:
    return method.labels if isinstance(method, Damped) else "empirical"


def on_index(method: str | Method | None, built: Method, kind: str = "", examples: int = 1) -> Method:
    """The method to score with on an index built for `built`, whose projection it takes if it names none.

    `kind` is that of the task, by which damping="auto" is a number; `examples` are those of the index.
    """
    if method is None:
        return built
    method = with_projection(parse(method), built.projection).resolve(kind, built, examples)
    if CUSTOM in method.describe():
        check_method(method)
    if method.steps != built.steps:
        raise UndeError(
            f"{method} needs the features of {method.steps} steps, the index holds {built.steps}: build another index"
        )
    if built.whitened and not (isinstance(method, EKFAC) and method.labels == _labels(built)):
        raise UndeError(
            f"the index holds gradients whitened for {built}, which answer for EKFAC alone, under any damping: build "
            f"another index for {method}, or one with projection='none' for all methods"
        )
    if (method.measure, method.projection) != (built.measure, built.projection):
        raise UndeError(
            f"{method} differentiates {method.measure!r} under {method.projection}, but the index holds "
            f"{built.measure!r} under {built.projection}: build another index, or choose a method like it"
        )
    return method
