"""Users' methods and kernels: how an index names them, and whether other processes can import them.

An index records a method by the importable name of its class and the values of its fields. When it is opened the class
is looked up among what is imported already: a file that somebody else wrote must not choose what is run.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from unde.errors import UndeError
from unde.kernels import Kernel
from unde.kernels.fingerprint import describe_kernel
from unde.methods.base import CUSTOM, Method

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
