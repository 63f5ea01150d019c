"""Normalisation layers: y = x̂ ⊙ w + b, so the gradients are Σ δ ⊙ x̂ and Σ δ."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde.features.layers.base import Out, Rule, fold, register, register_where


class Affine(Rule):
    """What the norms share. `normalized` gives x̂; `per_channel` sums over all but the parameter's own axes."""

    def forward(self, x: Tensor, y: Tensor, batch: int) -> Any:
        return x  # autograd keeps the same tensor for the norm's own backward pass: no extra memory

    def normalized(self, x: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} defines no normalized")

    def per_channel(self, g: Tensor, batch: int) -> Tensor:
        raise TypeError(f"{type(self).__name__} defines no per_channel")

    def backward(self, kept: Any, g: Tensor, batch: int, out: Out) -> None:
        p = self.projections.get("weight")
        if p is not None:
            out.add("weight", p(self.per_channel(g * self.normalized(kept), batch)))
        p = self.projections.get("bias")
        if p is not None:
            out.add("bias", p(self.per_channel(g, batch)))


@register(nn.LayerNorm)
class LayerNorm(Affine):
    def normalized(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.module.normalized_shape, eps=self.module.eps)

    def per_channel(self, g: Tensor, batch: int) -> Tensor:  # (B, ..., *normalized_shape) → (B, C)
        return g.reshape(batch, -1, self.module.weight.numel()).sum(1)


@register(nn.RMSNorm)
class RMSNorm(LayerNorm):
    parameters = ("weight",)

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


class ChannelNorm(Affine):
    """Parameters along axis 1."""

    def per_channel(self, g: Tensor, batch: int) -> Tensor:  # (B·n, C, ...) → (B, C)
        return fold(_summed(g), batch)


def _summed(x: Tensor) -> Tensor:  # (B·n, C, ...) → (B·n, C)
    return x.flatten(2).sum(2) if x.dim() > 2 else x


@register(nn.GroupNorm)
class GroupNorm(ChannelNorm):
    """x̂ = (x − μ)/σ with statistics of each row's groups.

    As in torch's own backward pass, Σ δ x̂ = (Σ δ x − μ Σ δ)/σ: no normalised copy of the activations is multiplied.
    """

    def forward(self, x: Tensor, y: Tensor, batch: int) -> Any:
        """The input, and μ and 1/σ as autograd has them for the backward pass, detached: they would hold the graph."""
        saved = [getattr(y.grad_fn, name, None) for name in ("_saved_result1", "_saved_result2")]
        found = [s.detach() for s in saved if s is not None and s.shape == (len(x), self.module.num_groups)]
        return x, *(found if len(found) == 2 else self.statistics(x))

    def backward(self, kept: Any, g: Tensor, batch: int, out: Out) -> None:
        precise = torch.promote_types(g.dtype, torch.float32)  # the difference may be small
        g, x, mean, rstd = (t.to(precise) for t in (g, *kept))
        total = _summed(g)  # (B·n, C)
        p = self.projections.get("weight")
        if p is not None:
            each = x.shape[1] // self.module.num_groups
            mean, rstd = (s.repeat_interleave(each, 1) for s in (mean, rstd))  # (B·n, C)
            out.add("weight", p(fold((_summed(g * x) - mean * total) * rstd, batch)))
        p = self.projections.get("bias")
        if p is not None:
            out.add("bias", p(fold(total, batch)))

    def statistics(self, x: Tensor) -> list[Tensor]:
        """μ and 1/σ, (B·n, groups) each."""
        m, (rows, channels, *sizes) = self.module, x.shape
        given = rows, channels, math.prod(sizes), m.num_groups, m.eps
        return list(torch.native_group_norm(x.contiguous(), None, None, *given)[1:])


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNorm(ChannelNorm):
    """With running statistics (eval mode): an affine map with constant x̂ = (x − μ)/σ.

    Σ δ x̂ = (Σ δ x − μ Σ δ)/σ needs no normalised copy of the activations.
    """

    @classmethod
    def covers(cls, module: Any) -> bool:
        return module.running_mean is not None

    def backward(self, kept: Any, g: Tensor, batch: int, out: Out) -> None:
        m = self.module
        total = self.per_channel(g, batch)  # (B, C)
        p = self.projections.get("weight")
        if p is not None:
            dots = self.per_channel(g * kept, batch)
            out.add("weight", p((dots - m.running_mean * total) * torch.rsqrt(m.running_var + m.eps)))
        p = self.projections.get("bias")
        if p is not None:
            out.add("bias", p(total))


# --- norms with a forward of their own, which puts channels in front or an activation behind ----------------


@register_where(lambda m: isinstance(m, nn.LayerNorm))
class InnerLayerNorm(LayerNorm):
    inside = staticmethod(F.layer_norm)


@register_where(lambda m: isinstance(m, nn.GroupNorm))
class InnerGroupNorm(GroupNorm):
    inside = staticmethod(F.group_norm)


@register_where(lambda m: isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)))
class InnerBatchNorm(BatchNorm):
    inside = staticmethod(F.batch_norm)
