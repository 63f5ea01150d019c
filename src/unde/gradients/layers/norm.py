"""Normalisation layers: y = x̂ ⊙ w + b, so the gradients are Σ δ ⊙ x̂ and Σ δ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from unde.gradients.layers.base import Call, FeatureSink, Rule, fold, register, register_where
from unde.projection import Projection


@register(nn.LayerNorm)
class LayerNorm(Rule):
    """x̂_t = (x_t − μ_t)/σ_t with statistics of each row, so Σ δ_t ⊙ x̂_t = Σ (1/σ_t) (δ_t ⊙ (x_t − μ_t)).

    The sum over rows with their 1/σ is a product of a matrix: no normalised copy of the activations is made.
    """

    whole = True  # statistics are laid out as the module has its rows

    def forward(self, x: Any, y: Tensor, batch: int) -> Any:
        """The input, which autograd keeps anyway, and its statistics: no extra memory."""
        call: Call = x
        x = call.args[0] if call.args else next(iter(call.kwargs.values()))
        m, precise = self.module, x.to(torch.promote_types(x.dtype, torch.float32))
        statistics = torch.native_layer_norm(precise, m.normalized_shape, None, None, m.eps)[1:]
        return [call.arrange(t) for t in (x, *statistics)]

    def backward(self, saved: Any, g: Tensor, batch: int, out: FeatureSink) -> None:
        p = self.projections.get("weight")
        if p is not None:
            precise = torch.promote_types(g.dtype, torch.float32)
            x, mean, rstd = (t.to(precise) for t in saved)
            dots = self.rows((x - mean).mul_(g), batch)
            out.add("weight", p(torch.bmm(rstd.reshape(batch, 1, -1), dots).squeeze(1)))
        p = self.projections.get("bias")
        if p is not None:
            out.add("bias", p(self.rows(g, batch).sum(1)))

    def rows(self, x: Tensor, batch: int) -> Tensor:  # (B·n, ..., *normalized_shape) → (B, T, C)
        return x.reshape(batch, -1, self.module.weight.numel())


@register(nn.RMSNorm)
class RMSNorm(Rule):
    parameters = ("weight",)

    def forward(self, x: Tensor, y: Tensor, batch: int) -> Any:
        return x  # autograd keeps it anyway

    def backward(self, saved: Any, g: Tensor, batch: int, out: FeatureSink) -> None:
        each = (g * self.normalized(saved)).reshape(batch, -1, self.module.weight.numel())
        out.add("weight", self.projections["weight"](each.sum(1)))

    def normalized(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, tuple(self.module.weight.shape), eps=getattr(self.module, "eps", None))


@register_where(lambda m: type(m).__name__.endswith("RMSNorm") and hasattr(m, "weight"))
class LibraryRMSNorm(RMSNorm):
    """Hugging Face's RMS norms. Statistics are taken in float32, as these modules do."""

    def normalized(self, x: Tensor) -> Tensor:
        eps = next(
            (getattr(self.module, a) for a in ("variance_epsilon", "eps") if hasattr(self.module, a)), 1e-6
        )
        return F.rms_norm(x.float(), (x.shape[-1],), eps=eps)


@register_where(lambda m: hasattr(m, "variance_epsilon") and [*m._parameters] == ["weight"])
class ScaleNorm(LibraryRMSNorm):
    """T5's, which it calls a LayerNorm: statistics in float32, the rest in the type of the input."""

    def normalized(self, x: Tensor) -> Tensor:
        square = x.float().square().mean(-1, keepdim=True)
        return x * torch.rsqrt(square + self.module.variance_epsilon)


def _summed(x: Tensor) -> Tensor:  # (B·n, C, ...) → (B·n, C)
    return x.flatten(2).sum(2) if x.dim() > 2 else x


@register(nn.GroupNorm)
class GroupNorm(Rule):
    """x̂ = (x − μ)/σ with statistics of each row's groups.

    As in torch's own backward pass, Σ δ x̂ = (Σ δ x − μ Σ δ)/σ: no normalised copy of the activations is multiplied.
    """

    def forward(self, x: Tensor, y: Tensor, batch: int) -> Any:
        m, (rows, channels, *sizes) = self.module, x.shape
        given = rows, channels, math.prod(sizes), m.num_groups, m.eps
        precise = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
        return x, *torch.native_group_norm(precise, None, None, *given)[1:]

    def backward(self, saved: Any, g: Tensor, batch: int, out: FeatureSink) -> None:
        precise = torch.promote_types(g.dtype, torch.float32)  # the difference may be small
        g, x, mean, rstd = (t.to(precise) for t in (g, *saved))
        total = _summed(g)  # (B·n, C)
        p = self.projections.get("weight")
        if p is not None:
            each = x.shape[1] // self.module.num_groups
            mean, rstd = (s.repeat_interleave(each, 1) for s in (mean, rstd))  # (B·n, C)
            out.add("weight", p(fold((_summed(g * x) - mean * total) * rstd, batch)))
        p = self.projections.get("bias")
        if p is not None:
            out.add("bias", p(fold(total, batch)))


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNorm(Rule):
    """With running statistics (eval mode): an affine map with constant x̂ = (x − μ)/σ.

    Σ δ x̂ = (Σ δ x − μ Σ δ)/σ needs no normalised copy of the activations.
    """

    @classmethod
    def covers(cls, module: Any) -> bool:
        return module.running_mean is not None

    def forward(self, x: Tensor, y: Tensor, batch: int) -> Any:
        return x  # autograd keeps it anyway

    def backward(self, saved: Any, g: Tensor, batch: int, out: FeatureSink) -> None:
        m = self.module
        total = fold(_summed(g), batch)  # (B, C)
        p = self.projections.get("weight")
        if p is not None:
            dots = fold(_summed(g * saved), batch)
            out.add("weight", p((dots - m.running_mean * total) * torch.rsqrt(m.running_var + m.eps)))
        p = self.projections.get("bias")
        if p is not None:
            out.add("bias", p(total))


# --- subclasses that override forward: channels in front, or an activation behind ---------------------------


@register_where(lambda m: isinstance(m, nn.LayerNorm))
class InnerLayerNorm(LayerNorm):
    inside = staticmethod(F.layer_norm)


@register_where(lambda m: isinstance(m, nn.GroupNorm))
class InnerGroupNorm(GroupNorm):
    inside = staticmethod(F.group_norm)


@register_where(lambda m: isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)))
class InnerBatchNorm(BatchNorm):
    inside = staticmethod(F.batch_norm)


def _holds_vectors(module: nn.Module) -> bool:
    """Whether a module has nothing but vectors of one length."""
    shapes = {tuple(p.shape) for p in module._parameters.values() if p is not None}
    return not module._modules and len(shapes) == 1 and len(next(iter(shapes))) == 1


@register_where(_holds_vectors, last=True)
class Elementwise(Rule):
    """Scales and shifts of any library: y = a(x) ⊙ w + b along one axis, whatever a(x) is.

    The factor of a parameter is the module's output with ones in its place minus that with zeros. So the norms of all
    families (weights that count from one, gates, channels in front) are one rule; the check against autograd rejects
    modules that use their parameters differently.
    """

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
