"""A method that an index names and that is not imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unde.errors import UndeError
from unde.kernels import Kernel
from unde.methods.base import OWN, Method


@dataclass(frozen=True)
class Elsewhere(Method):
    """A method of somebody's own that is not imported here. What an index holds of it is known, and files can be read
    and checked, but nothing can be scored with it. A name in an index never makes anything be imported."""

    description: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.description[OWN]
        known = {"name": self.description["name"], "measure": own["measure"], "beside": tuple(own["beside"])}
        for name, value in known.items():  # which are the class's own elsewhere
            object.__setattr__(self, name, value)

    @property
    def steps(self) -> int:
        return self.description[OWN]["steps"]

    def describe(self) -> dict[str, Any]:
        return dict(self.description)

    def __repr__(self) -> str:
        return f"{self.description[OWN]['class']} (not imported)"

    def __hash__(self) -> int:
        return hash(repr(self))

    def _missing(self) -> UndeError:
        where = self.description[OWN]["class"]
        module, _, name = where.partition(":")
        how = "define it" if module == "__main__" else f"`from {module} import {name.partition('.')[0]}`"
        return UndeError(
            f"the index was built for the method {where}, which is not imported here, and nothing is imported because "
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
