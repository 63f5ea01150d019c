"""What every method names, and what `final` may ask about both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from unde.kernels import Identity, Kernel
from unde.methods.custom import name_of
from unde.projection import Spec
from unde.tasks.identity import is_builtin

LATER = "later"  # in the metadata of a field: the value that descriptions leave out, that of earlier releases
OWN = "own"  # in a description: of a method that is no part of unde


@dataclass(frozen=True)
class FinalContext:
    """What `final` may ask about the Q queries and N training examples of a block."""

    query_squares: Callable[[], Tensor]  # (Q, M) squared norms of the features of each group
    train_squares: Callable[[], Tensor]  # (N, M)
    leverage: Callable[[], Tensor]  # (N,) h = ⟨g(n), K g(n)⟩
    beside: Callable[[], Tensor]  # (N, ·) what the method keeps beside features


@dataclass(frozen=True)
class Method:
    """What every method names. Two methods fit one index if measure and projection agree.

    Without a `projection` a method takes kron(16) where an index is built, and that of the index where one
    is scored.
    """

    name: ClassVar[str] = ""
    measure: ClassVar[str] = "loss"  # what the task is asked to differentiate
    factors: ClassVar[bool] = False  # whether K needs the covariances of inputs and output gradients
    beside: ClassVar[tuple[str, ...]] = ()  # measures whose values are kept beside the features
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
        """Over how many steps of a trajectory features are kept apart; 1 for none."""
        return 1

    @property
    def terms(self) -> int:
        """Features that an index holds of an example under each checkpoint."""
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
        """K, the identity unless a method says otherwise."""
        return Identity()

    def final(self, linear: Tensor, sides: FinalContext, weights: Tensor) -> Tensor:
        """(Q, N) scores, entry by entry from the linear part; differentiable in `weights` (M,)."""
        return linear

    def by_group(self, linear: Tensor, sides: FinalContext) -> Tensor:
        """(Q, N, M) contributions of the groups, from their linear parts; weights act on what this gives."""
        return linear

    def check_query(self, example: Any) -> None:
        """Raises if the method cannot be asked about queries like this one."""

    def query(self, task: Any, example: Any, random: Any) -> Any:
        """A training example, perturbed or not, as a query that this method can be asked about."""
        return example

    def resolve(self, kind: str, built: Method | None = None, examples: int = 1) -> Method:
        """With settings in place of "auto", by the `kind` of task and the method that an index was `built` for."""
        return self

    @property
    def signed(self) -> Method:
        """The method whose scores tell proponents from opponents, and are sums over groups if those are: what
        self-retrieval learns on. Itself, unless `final` loses the sign."""
        return self

    @property
    def probe(self) -> Method | None:
        """Another measurement of the same examples that K is made of, which an index keeps beside its own."""
        return None

    def settings(self) -> dict[str, Any]:
        """The fields. Those added later are left out where they are as before, so that ids are stable."""
        later = {f.name: f.metadata[LATER] for f in fields(self) if LATER in f.metadata}
        return {k: v for k, v in asdict(self).items() if k not in later or v != later[k]}

    def describe(self) -> dict[str, Any]:
        """A JSON-able description that `parse` reads back; of a method of one's own also where it is defined."""
        if is_builtin(type(self)):
            return {"name": self.name, **self.settings()}
        own = {
            "class": name_of(type(self)),
            "measure": self.measure,
            "beside": list(self.beside),
            "steps": self.steps,
        }
        return {"name": self.name or type(self).__name__, **self.settings(), OWN: own}
