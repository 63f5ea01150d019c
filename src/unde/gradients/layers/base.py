"""The rule interface and its registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from unde.projection import Projection

CHUNK = 2**28  # bytes of whole per-example gradients held at once, where a projection needs them


class Out(Protocol):
    """Where a rule puts the features of one module's parameters."""

    def add(self, parameter: str, feature: Tensor) -> None:
        """A feature, (B, size)."""

    def outer(self, parameter: str, left: Tensor, right: Tensor) -> None:
        """The gradient Σ_t left_t right_tᵀ by its factors (B·n, T, ·), both projected already if `factored`."""


class Call(NamedTuple):
    """A whole call of a module, and what brings the examples of its output to the front."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arranged: Callable[[Tensor], Tensor]


class Rule:
    """How one module's parameters get per-example features.

    `forward` sees the input and the output, and returns all that has to be kept (already projected where it can be);
    `backward` gets that and the gradient of the output, and hands features to `out`. Tensors come with the
    batch in front: (B·n, ...), n > 1 where a model folds something into the batch. A `whole` rule gets the `Call` in
    place of the input, as the module got it. Where a module does more than its layer, `inside` is the function of torch
    that is the layer, called with the module's weight.
    """

    parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")
    whole: ClassVar[bool] = False
    inside: ClassVar[Any] = None

    def __init__(self, module: Any, projections: Mapping[str, Projection]) -> None:
        self.module = module
        self.projections = projections  # of those parameters of the module that are attributed

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

    def backward(self, kept: Any, g: Tensor, batch: int, out: Out) -> None:
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
    """For classes of libraries that are not imported here: recognised by name and attributes. The `last` are asked when
    no other is the right one."""

    def add(rule: R) -> R:
        (_LAST if last else _LOOKALIKES).append((test, rule))
        return rule

    return add


def rule_for(module: nn.Module) -> type[Rule] | None:
    """The rule for this module. A subclass with a forward of its own may compute something else: not its rule."""
    known: type | None = next((cls for cls in type(module).__mro__ if cls in _RULES), None)
    if known is not None and type(module).forward is getattr(known, "forward", None):
        return _RULES[known] if _RULES[known].covers(module) else None
    return next((rule for test, rule in (*_LOOKALIKES, *_LAST) if test(module) and rule.covers(module)), None)


def fold(x: Tensor, batch: int) -> Tensor:
    """(B·n, ...) → (B, ...), summed over n."""
    return x if x.shape[0] == batch else x.unflatten(0, (batch, -1)).sum(1)


def outer(projection: Projection, left: Tensor, right: Tensor) -> Tensor:
    """The feature of G = Σ_t left_t right_tᵀ, from factors (B, T, ·); both projected already if `factored`."""
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
