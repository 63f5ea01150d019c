"""Scales and shifts of any library: y = a(x) ⊙ w + b along one axis, whatever a(x) is.

What multiplies a parameter is what the module gives with ones in its place, less what it gives with zeros. So the norms
of all families (weights that count from one, gates, channels in front) are one rule; modules that do something else
with their parameters are found out when a model is covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from unde.gradients.layers.base import Call, Out, Rule, register_where
from unde.projection import Projection


def _small(module: nn.Module) -> bool:
    """A module of nothing but vectors of one length."""
    own = [p for p in module._parameters.values() if p is not None]
    lengths = {tuple(p.shape) for p in own}
    return not module._modules and len(lengths) == 1 and len(next(iter(lengths))) == 1


@register_where(_small, last=True)
class Elementwise(Rule):
    whole = True

    def __init__(self, module: Any, projections: Mapping[str, Projection]) -> None:
        super().__init__(module, projections)
        self.axes: dict[str, int] = {}

    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        return tuple(k for k, p in module._parameters.items() if p is not None)

    def forward(self, x: Any, y: Tensor, batch: int) -> Any:
        return x

    def backward(self, kept: Any, g: Tensor, batch: int, out: Out) -> None:
        for name, p in self.projections.items():
            slope, axis = self.slope(name, kept)
            each = (g * slope).movedim(axis, -1)
            out.add(name, p(each.reshape(batch, -1, each.shape[-1]).sum(1)))

    def slope(self, name: str, call: Call) -> tuple[Tensor, int]:
        """What multiplies the parameter, examples in front, and along which axis it is laid out."""
        own = self.module._parameters[name]
        none = self._with(name, torch.zeros_like(own), call)
        slope = self._with(name, torch.ones_like(own), call) - none
        if name not in self.axes:
            ramp = torch.linspace(-1, 1, len(own), device=own.device).to(own.dtype)
            self.axes[name] = _axis(slope, ramp, self._with(name, ramp, call) - none)
        return slope, self.axes[name]

    def _with(self, name: str, value: Tensor, call: Call) -> Tensor:
        made = functional_call(self.module, {name: value}, call.args, dict(call.kwargs))
        return call.arranged(made)


def _axis(slope: Tensor, ramp: Tensor, made: Tensor) -> int:
    wide = 0.05 * slope.abs().max()  # of half precision too: another axis is off by more
    for axis in (-1, *range(1, slope.dim() - 1)):
        if slope.shape[axis] == len(ramp):
            expected = slope * ramp.view(-1, *[1] * (-1 - (axis if axis < 0 else axis - slope.dim())))
            if torch.allclose(made, expected, rtol=0.0, atol=float(wide)):
                return axis
    raise NotImplementedError("the parameter does not scale or shift along an axis")
