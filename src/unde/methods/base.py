"""The base class of methods, and what `final` may read of both sides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from unde.errors import UndeError
from unde.kernels import Identity, Kernel
from unde.projection import Spec
from unde.tasks.base import is_builtin

OMIT_IF = "omit_if"  # in the metadata of a field added later: the value that descriptions omit, so that ids are stable
CUSTOM = "custom"  # in a description: class, measures and steps of a user's method
T = TypeVar("T")


def class_name(cls: type) -> str:
    """MODULE:NAME, by which `find_class` finds the class.

    >>> import collections
    >>> class_name(collections.Counter)
    'collections:Counter'
    """
    name = f"{cls.__module__}:{cls.__qualname__}"
    if find_class(name, object) is not cls:
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


def find_class(name: str, base: type[T]) -> type[T] | None:
    """The subclass of `base` called MODULE:NAME, if its module is imported."""
    module, _, path = name.partition(":")
    thing: Any = sys.modules.get(module)
    for part in path.split("."):
        thing = getattr(thing, part, None)
    return thing if isinstance(thing, type) and issubclass(thing, base) else None


@dataclass(frozen=True)
class FinalContext:
    """What `final` may read of the Q queries and N training examples of a block."""

    query_squares: Callable[[], Tensor]  # (Q, M) squared norms of the features of each group
    train_squares: Callable[[], Tensor]  # (N, M)
    leverage: Callable[[], Tensor]  # (N,) h = ⟨g(n), K g(n)⟩
    extra_values: Callable[[], Tensor]  # (N, ·) of the method's `extra_measures`


@dataclass(frozen=True)
class Method:
    """Base class of methods. Two methods fit one index if measure and projection agree.

    Args:
        projection: The projection of features. None takes that of the index, or the default when one is built.
    """

    name: ClassVar[str] = ""
    measure: ClassVar[str] = "loss"  # what is differentiated
    factors: ClassVar[bool] = False  # whether K needs the covariances of inputs and output gradients
    whitened: ClassVar[bool] = False  # whether features are whitened, (Λ + λ)^−1/2 Qᵀ g
    extra_measures: ClassVar[tuple[str, ...]] = ()  # measures whose values are stored with the features
    projection: str | None = None

    def __post_init__(self) -> None:
        if self.projection is not None:
            object.__setattr__(self, "projection", str(Spec.parse(self.projection)))

    @property
    def linear(self) -> bool:
        """Whether `final` is the identity."""
        return True

    @property
    def steps(self) -> int:
        """Steps of a trajectory whose features are stored separately; 1 for none."""
        return 1

    @property
    def terms(self) -> int:
        """Features of an example under each checkpoint."""
        return self.steps

    def measure_of(self, term: int) -> str:
        """What is differentiated in a term."""
        return self.measure

    @property
    def groupwise(self) -> bool:
        """Whether `by_group` is not the identity: weighted totals are no single product then."""
        return False

    @property
    def kernel(self) -> Kernel:
        """K; the identity by default."""
        return Identity()

    def final(self, linear: Tensor, sides: FinalContext, weights: Tensor) -> Tensor:
        """(Q, N) scores, entry by entry from the linear part; differentiable in `weights` (M,)."""
        return linear

    def by_group(self, linear: Tensor, sides: FinalContext) -> Tensor:
        """(Q, N, M) contributions of the groups, from their linear parts; weights act on what this gives."""
        return linear

    def check_query(self, example: Any) -> None:
        """Raise if the method cannot score queries like this one."""

    def query(self, task: Any, example: Any, random: Any) -> Any:
        """Turn a training example, perturbed or not, into a query of this method."""
        return example

    def resolve(self, kind: str, built: Method | None = None, examples: int = 1) -> Method:
        """Replace "auto" by settings, by the `kind` of task and the method that an index was `built` for."""
        return self

    @property
    def signed(self) -> Method:
        """The method that self-retrieval learns on: itself, unless `final` loses the sign of proponents."""
        return self

    @property
    def probe(self) -> Method | None:
        """Another measurement of the same examples that K is fitted to; the index stores it too."""
        return None

    def settings(self) -> dict[str, Any]:
        """The fields. Omit fields added later when they hold their default, so that ids are stable."""
        omit = {f.name: f.metadata[OMIT_IF] for f in fields(self) if OMIT_IF in f.metadata}
        return {k: v for k, v in asdict(self).items() if k not in omit or v != omit[k]}

    def describe(self) -> dict[str, Any]:
        """A JSON-able description that `parse` reads back; of a user's method also where it is defined."""
        if is_builtin(type(self)):
            return {"name": self.name, **self.settings()}
        custom = {
            "class": class_name(type(self)),
            "measure": self.measure,
            "extra_measures": list(self.extra_measures),
            "steps": self.steps,
        }
        return {"name": self.name or type(self).__name__, **self.settings(), CUSTOM: custom}
