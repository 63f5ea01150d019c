"""Linear layers: G = Σ_t δ_t x_tᵀ."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from whence.features.layers.base import Add, Rule, add_outer, register, register_where


@register(nn.Linear)
class Linear(Rule):
    def forward(self, x: Tensor, batch: int) -> Any:
        p = self.projections.get("weight")
        if p is None:
            return None
        x = x.reshape(batch, -1, x.shape[-1])  # (B, T, in)
        return p.cols(x) if p.factored else x

    def backward(self, kept: Any, g: Tensor, batch: int, add: Add) -> None:
        g = g.reshape(batch, -1, g.shape[-1])  # (B, T, out)
        p = self.projections.get("weight")
        if p is not None:
            add_outer(p, p.rows(g) if p.factored else g, kept, lambda f: add("weight", f))
        p = self.projections.get("bias")
        if p is not None:
            add("bias", p(g.sum(1)))


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


@register_where(_is_conv1d)
class TransposedLinear(Linear):
    """Hugging Face's Conv1D, as in GPT-2: a linear layer whose weight is stored (in, out)."""

    def forward(self, x: Tensor, batch: int) -> Any:
        p = self.projections.get("weight")
        if p is None:
            return None
        x = x.reshape(batch, -1, x.shape[-1])
        return p.rows(x) if p.factored else x

    def backward(self, kept: Any, g: Tensor, batch: int, add: Add) -> None:
        g = g.reshape(batch, -1, g.shape[-1])
        p = self.projections.get("weight")
        if p is not None:
            add_outer(p, kept, p.cols(g) if p.factored else g, lambda f: add("weight", f))
        p = self.projections.get("bias")
        if p is not None:
            add("bias", p(g.sum(1)))
