"""Methods: named choices of measurement, projection, kernel K and final transform.

    score(q, n; w) = final( Σ_c η_c Σ_j w_j ⟨ g_j(q), [K g(n)]_j ⟩ )

TracIn has K = I (Eq. 1 of the paper), TRAK K = (ΦᵀΦ + λI)⁻¹ (Eq. 2).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from whence.errors import WhenceError, unknown
from whence.kernels.gram import Gram
from whence.projection import Spec

PROJECTION = "kron(16)"


@dataclass(frozen=True)
class Method:
    """What every method names. Two methods fit one index if measure and projection agree.

    Without a `projection` a method takes kron(16) where an index is built, and that of the index where one
    is scored.
    """

    name: ClassVar[str] = ""
    measure: ClassVar[str] = "loss"  # what the task is asked to differentiate
    projection: str | None = None

    def __post_init__(self) -> None:
        if self.projection is not None:
            object.__setattr__(self, "projection", str(Spec.parse(self.projection)))

    @property
    def linear(self) -> bool:
        """Whether `final` is the identity."""
        return True

    @property
    def kernel(self) -> Gram | None:
        """K, or None for the identity."""
        return None

    def final(self, linear: Tensor, query_squares: Tensor, train_squares: Tensor, weights: Tensor) -> Tensor:
        """(Q, N) scores, entry by entry from the linear part; differentiable in `weights` (M,).

        The squares are squared norms of the features of each group, (Q, M) and (N, M).
        """
        return linear

    def describe(self) -> dict[str, Any]:
        """A JSON-able description that `parse` reads back."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class TracIn(Method):
    """Inner product of gradients; with several checkpoints, weighted by their learning rates (TracInCP).

    `cosine=True` divides by the norms of both features, weights inside the norms.
    """

    name: ClassVar[str] = "tracin"
    cosine: bool = False

    @property
    def linear(self) -> bool:
        return not self.cosine

    def final(self, linear: Tensor, query_squares: Tensor, train_squares: Tensor, weights: Tensor) -> Tensor:
        if not self.cosine:
            return linear
        # Clamped before the root: a feature of zeros has score 0, and no NaN as its gradient.
        tiny = torch.finfo(linear.dtype).tiny
        q = (query_squares @ weights).clamp(min=tiny).rsqrt()  # (Q,)
        n = (train_squares @ weights).clamp(min=tiny).rsqrt()  # (N,)
        return linear * q.unsqueeze(1) * n


@dataclass(frozen=True)
class TRAK(Method):
    """TRAK with the loss as output function. `damping` is a multiple of the mean diagonal of ΦᵀΦ, or
    with `relative=False` the absolute λ of the paper. `form` is "primal", "dual", or "auto": the smaller."""

    name: ClassVar[str] = "trak"
    damping: float = 0.1
    relative: bool = True
    form: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.damping, bool) or not 0 <= self.damping < math.inf:
            raise WhenceError(f"damping {self.damping} of TRAK: expected a number ≥ 0")
        object.__setattr__(self, "damping", float(self.damping))
        if self.form not in ("auto", "primal", "dual"):
            raise unknown("form", self.form, ("auto", "primal", "dual"))

    @property
    def kernel(self) -> Gram | None:
        return Gram(self.damping, self.relative, self.form)


METHODS: dict[str, type[Method]] = {m.name: m for m in (TracIn, TRAK)}
_SHORT = {"tracin-cosine": TracIn(cosine=True)}


def parse(method: str | Method | dict[str, Any]) -> Method:
    """A method from its short name, its description, or itself.

    >>> parse("trak")
    TRAK(projection=None, damping=0.1, relative=True, form='auto')
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, dict):
        fields = dict(method)
        name = fields.pop("name", None)
        if name not in METHODS:
            raise unknown("method", name, METHODS)
        try:
            return METHODS[name](**fields)
        except TypeError as e:
            raise WhenceError(f"{name!r} cannot be made from {fields}: {e}") from None
    if method in METHODS:
        return METHODS[method]()
    if method in _SHORT:
        return _SHORT[method]
    raise unknown("method", method, [*METHODS, *_SHORT])


def for_building(method: str | Method) -> Method:
    """The method to build an index for, with its projection settled."""
    method = parse(method)
    return method if method.projection else replace(method, projection=PROJECTION)


def on_index(method: str | Method | None, built: Method) -> Method:
    """The method to score with on an index built for `built`, whose projection it takes if it names none."""
    if method is None:
        return built
    method = parse(method)
    if method.projection is None:
        method = replace(method, projection=built.projection)
    if (method.measure, method.projection) != (built.measure, built.projection):
        raise WhenceError(
            f"{method} differentiates {method.measure!r} under {method.projection}, but the index holds "
            f"{built.measure!r} under {built.projection}: build another index, or choose a method like it"
        )
    return method
