"""Methods by name and by description, and the method to build or score an index with.

An index records a user's method by the importable name of its class and the values of its fields. When it is opened the
class is looked up among what is imported already: a file that somebody else wrote must not choose what is run.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from unde.errors import UndeError, unknown
from unde.kernels import Kernel
from unde.kernels.base import describe_kernel
from unde.methods.base import CUSTOM, OMIT_IF, Method, find_class
from unde.methods.builtin import AUTO, EKFAC, TRAK, Damped, Fisher, LoGRA, TracIn
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


_MOST_STEPS = 2**16
_MOST_MEASURES = 64


def check_description(name: Any, custom: Any) -> None:
    """Raise unless this could be what `Method.describe` wrote of a user's method."""
    types = {"class": str, "measure": str, "extra_measures": list, "steps": int}
    good = isinstance(name, str) and isinstance(custom, Mapping) and set(custom) == set(types)
    good = good and all(type(custom[key]) is kind for key, kind in types.items()) and ":" in custom["class"]
    good = good and 1 <= custom["steps"] <= _MOST_STEPS and len(custom["extra_measures"]) <= _MOST_MEASURES
    if not (good and all(isinstance(measure, str) for measure in custom["extra_measures"])):
        raise UndeError(f"the method {str(name)[:80]!r} is not described as methods are: {str(custom)[:200]}")


def check_method(method: Any) -> None:
    """Raise for a user's method that an index could not record."""
    what = type(method).__name__
    for name, value in asdict(method).items():
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise UndeError(
                f"{name} of the method {what} is a {type(value).__name__}: expected numbers and names, which an index "
                "can record"
            )
    describe_kernel(method.kernel, what)


def check_picklable(method: Any) -> None:
    """Raise for a user's method that other processes could not import."""
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


@dataclass(frozen=True)
class UnimportedMethod(Method):
    """A user's method that an index names and that is not imported here.

    Files of the index can be read and checked, but nothing can be scored: a name in an index imports nothing.
    """

    description: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        custom = self.description[CUSTOM]
        object.__setattr__(self, "name", self.description["name"])
        object.__setattr__(self, "measure", custom["measure"])
        object.__setattr__(self, "extra_measures", tuple(custom["extra_measures"]))

    @property
    def steps(self) -> int:
        return self.description[CUSTOM]["steps"]

    def describe(self) -> dict[str, Any]:
        return dict(self.description)

    def __repr__(self) -> str:
        return f"{self.description[CUSTOM]['class']} (not imported)"

    def __hash__(self) -> int:
        return hash(repr(self))

    def _missing(self) -> UndeError:
        path = self.description[CUSTOM]["class"]
        module, _, name = path.partition(":")
        how = "define it" if module == "__main__" else f"`from {module} import {name.partition('.')[0]}`"
        return UndeError(
            f"the index was built for the method {path}, which is not imported here, and nothing is imported because "
            f"an index names it: {how} before this, or name another method, such as method='tracin'"
        )

    @property
    def linear(self) -> bool:
        raise self._missing()

    @property
    def groupwise(self) -> bool:
        raise self._missing()

    @property
    def kernel(self) -> Kernel:
        raise self._missing()

    @property
    def signed(self) -> Method:
        raise self._missing()
