"""Scales and shifts of any library: y = a(x) ⊙ w + b along one axis, whatever a(x) is.

The factor of a parameter is the module's output with ones in its place minus that with zeros. So the norms of all
families (weights that count from one, gates, channels in front) are one rule; the check against autograd rejects
modules that use their parameters differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from unde.gradients.layers.base import Call, FeatureSink, Rule, register_where
from unde.projection import Projection


def _holds_vectors(module: nn.Module) -> bool:
    """Whether a module has nothing but vectors of one length."""
    shapes = {tuple(p.shape) for p in module._parameters.values() if p is not None}
    return not module._modules and len(shapes) == 1 and len(next(iter(shapes))) == 1


@register_where(_holds_vectors, last=True)
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

    def backward(self, saved: Any, g: Tensor, batch: int, out: FeatureSink) -> None:
        for name, p in self.projections.items():
            slope, axis = self.slope(name, saved)
            each = (g * slope).movedim(axis, -1)
            out.add(name, p(each.reshape(batch, -1, each.shape[-1]).sum(1)))

    def slope(self, name: str, call: Call) -> tuple[Tensor, int]:
        """The factor of the parameter, examples in front, and the axis along which the parameter lies."""
        parameter = self.module._parameters[name]
        zero = self._call_with(name, torch.zeros_like(parameter), call)
        slope = self._call_with(name, torch.ones_like(parameter), call) - zero
        if name not in self.axes:
            ramp = torch.linspace(-1, 1, len(parameter), device=parameter.device).to(parameter.dtype)
            self.axes[name] = _find_axis(slope, ramp, self._call_with(name, ramp, call) - zero)
        return slope, self.axes[name]

    def _call_with(self, name: str, value: Tensor, call: Call) -> Tensor:
        return call.arrange(functional_call(self.module, {name: value}, call.args, dict(call.kwargs)))


def _find_axis(slope: Tensor, ramp: Tensor, output: Tensor) -> int:
    tolerance = 0.05 * float(slope.abs().max())  # for half precision; another axis is off by more
    for axis in (-1, *range(1, slope.dim() - 1)):
        if slope.shape[axis] == len(ramp):
            expected = slope * ramp.view(-1, *[1] * (-1 - (axis if axis < 0 else axis - slope.dim())))
            if torch.allclose(output, expected, rtol=0.0, atol=tolerance):
                return axis
    raise NotImplementedError("the parameter does not scale or shift along an axis")
