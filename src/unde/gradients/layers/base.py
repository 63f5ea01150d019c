"""The rule interface and its registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from unde.projection import Projection

CHUNK = 2**28  # bytes of whole per-example gradients held at once, where a projection needs them


class FeatureSink(Protocol):
    """Receives the features of one module's parameters from its rule."""

    def add(self, parameter: str, feature: Tensor) -> None:
        """Add a feature, (B, size)."""

    def outer(self, parameter: str, left: Tensor, right: Tensor) -> None:
        """Add the gradient Σ_t left_t right_tᵀ by its sides (B·n, T, ·), both projected already if `factored`."""


class Call(NamedTuple):
    """A call of a module, and a function that moves the examples of its tensors to the front."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arrange: Callable[[Tensor], Tensor]


class Rule:
    """Per-example features of one module's parameters.

    `forward` gets the input and the output, and returns what `backward` needs (projected where possible); `backward`
    gets that and the output gradient, and passes features to `out`. Tensors have the batch in front: (B·n, ...), n > 1
    where a model folds something into the batch. A `whole` rule gets the `Call` in place of the input. Where a module
    does more than its layer, `inside` is the torch function that is the layer, called with the module's weight.
    """

    parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")
    whole: ClassVar[bool] = False
    inside: ClassVar[Any] = None

    def __init__(self, module: Any, projections: Mapping[str, Projection]) -> None:
        self.module = module
        self.projections = projections  # of the attributed parameters

    @classmethod
    def covers(cls, module: Any) -> bool:
        """Whether the rule holds for this module, given its options."""
        return True

    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        """The parameters of a module that the rule is for."""
        return cls.parameters

    def forward(self, x: Any, y: Tensor, batch: int) -> Any:
        raise TypeError(f"{type(self).__name__} defines no forward")

    def backward(self, saved: Any, g: Tensor, batch: int, out: FeatureSink) -> None:
        raise TypeError(f"{type(self).__name__} defines no backward")


R = TypeVar("R", bound=type[Rule])
_RULES: dict[type, type[Rule]] = {}
_LOOKALIKES: list[tuple[Callable[[nn.Module], bool], type[Rule]]] = []
_LAST: list[tuple[Callable[[nn.Module], bool], type[Rule]]] = []


def register(*types: type[nn.Module]) -> Callable[[R], R]:
    def add(rule: R) -> R:
        _RULES.update(dict.fromkeys(types, rule))
        return rule

    return add


def register_where(test: Callable[[nn.Module], bool], last: bool = False) -> Callable[[R], R]:
    """Register a rule for modules that pass a test: classes of libraries that are not imported here. Rules with `last`
    are tried after all others."""

    def add(rule: R) -> R:
        (_LAST if last else _LOOKALIKES).append((test, rule))
        return rule

    return add


def rule_for(module: nn.Module) -> type[Rule] | None:
    """The rule for this module. A subclass that overrides forward may compute something else: not its base's rule."""
    base: type | None = next((cls for cls in type(module).__mro__ if cls in _RULES), None)
    if base is not None and type(module).forward is getattr(base, "forward", None):
        return _RULES[base] if _RULES[base].covers(module) else None
    return next((rule for test, rule in (*_LOOKALIKES, *_LAST) if test(module) and rule.covers(module)), None)


def fold(x: Tensor, batch: int) -> Tensor:
    """(B·n, ...) → (B, ...), summed over n."""
    return x if x.shape[0] == batch else x.unflatten(0, (batch, -1)).sum(1)


def outer(projection: Projection, left: Tensor, right: Tensor) -> Tensor:
    """The feature of G = Σ_t left_t right_tᵀ, from sides (B, T, ·), both projected already if `factored`."""
    dtype = torch.promote_types(left.dtype, right.dtype)
    left, right = left.to(dtype).mT, right.to(dtype)
    if projection.factored:
        return torch.bmm(left, right).flatten(1)
    step = max(1, CHUNK // (projection.R * projection.C * right.element_size()))
    parts = [
        projection.flat(torch.bmm(left[i : i + step], right[i : i + step]).flatten(1))
        for i in range(0, left.shape[0], step)
    ]
    return torch.cat(parts)
