"""Normalisation layers: y = x̂ ⊙ w + b, so the gradients are Σ δ ⊙ x̂ and Σ δ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whence.features.layers.base import Out, Rule, fold, register, register_where


class Affine(Rule):
    """What the norms share. `normalized` gives x̂; `per_channel` sums over all but the parameter's own axes."""

    def forward(self, x: Tensor, batch: int) -> Any:
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

    def backward(self, kept: Any, g: Tensor, batch: int, out: Out) -> None:
        precise = torch.promote_types(g.dtype, torch.float32)  # the difference may be small
        g, x = g.to(precise), kept.to(precise)
        total = _summed(g)  # (B·n, C)
        p = self.projections.get("weight")
        if p is not None:
            mean, rstd = self.statistics(x)
            out.add("weight", p(fold((_summed(g * x) - mean * total) * rstd, batch)))
        p = self.projections.get("bias")
        if p is not None:
            out.add("bias", p(fold(total, batch)))

    def statistics(self, x: Tensor) -> Iterator[Tensor]:
        """μ and 1/σ, (B·n, C) each."""
        m, (rows, channels, *sizes) = self.module, x.shape
        _, *found = torch.native_group_norm(
            x.contiguous(), None, None, rows, channels, math.prod(sizes), m.num_groups, m.eps
        )
        return (s.repeat_interleave(channels // m.num_groups, 1) for s in found)


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
