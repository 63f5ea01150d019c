"""Linear layers, G = Σ_t δ_t x_tᵀ, and embeddings, which are linear layers on one-hot rows."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from unde.gradients.layers.base import FeatureSink, Rule, register, register_where
from unde.onednn import is_conv1d
from unde.projection import Projection


@register(nn.Linear)
class Linear(Rule):
    def forward(self, x: Tensor, y: Tensor, batch: int) -> Any:
        p = self.projections.get("weight")
        if p is None:
            return None
        x = x.reshape(batch, -1, x.shape[-1])  # (B, T, in)
        return self.inputs(p, x) if p.factored else x

    def backward(self, saved: Any, g: Tensor, batch: int, out: FeatureSink) -> None:
        g = g.reshape(batch, -1, g.shape[-1])  # (B, T, out)
        p = self.projections.get("weight")
        if p is not None:
            self.combine(out, saved, self.outputs(p, g) if p.factored else g)
        p = self.projections.get("bias")
        if p is not None:
            out.add("bias", p(g.sum(1)))

    def inputs(self, p: Projection, x: Tensor) -> Tensor:
        return p.cols(x)

    def outputs(self, p: Projection, g: Tensor) -> Tensor:
        return p.rows(g)

    def combine(self, out: FeatureSink, x: Tensor, g: Tensor) -> None:
        out.outer("weight", g, x)


def _holds_matrix(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2


@register_where(is_conv1d)
class TransposedLinear(Linear):
    """Hugging Face's Conv1D, as in GPT-2: a linear layer whose weight is stored (in, out)."""

    def inputs(self, p: Projection, x: Tensor) -> Tensor:
        return p.rows(x)

    def outputs(self, p: Projection, g: Tensor) -> Tensor:
        return p.cols(g)

    def combine(self, out: FeatureSink, x: Tensor, g: Tensor) -> None:
        out.outer("weight", x, g)


@register_where(_holds_matrix, last=True)
class InnerLinear(Linear):
    """A linear map inside a module that does more, as routers do, which choose experts by what it gives."""

    inside = F.linear


@register(nn.Embedding)
class Embedding(Rule):
    parameters = ("weight",)

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        # Frequency-scaled gradients and renormalised rows are not gradients of a lookup.
        return not module.scale_grad_by_freq and module.max_norm is None

    def forward(self, x: Tensor, y: Tensor, batch: int) -> Any:
        return x.reshape(batch, -1)  # (B, T) token ids

    def backward(self, saved: Any, g: Tensor, batch: int, out: FeatureSink) -> None:
        p, ids = self.projections["weight"], saved
        g = g.reshape(batch, -1, g.shape[-1])  # (B, T, d)
        if self.module.padding_idx is not None:
            g = g.masked_fill((ids == self.module.padding_idx).unsqueeze(-1), 0)
        if p.factored and p.row_matrix is not None:
            out.outer("weight", p.row_matrix.T[ids], p.cols(g))
        else:
            out.add("weight", _rowwise(p, ids, g))


@register_where(lambda m: isinstance(m, nn.Embedding))
class InnerEmbedding(Embedding):
    """One that does more than look up: the positions of OPT and BART, which count from two, or Gemma's scale."""

    inside = staticmethod(F.embedding)


def _rowwise(p: Projection, ids: Tensor, g: Tensor) -> Tensor:
    """Features when rows are not projected: gradients are added up row by row."""
    columns = p.cols(g) if p.factored else g
    rows = columns.new_zeros(g.shape[0], p.R, columns.shape[-1])  # (B, V, c)
    rows.scatter_add_(1, ids.unsqueeze(-1).expand_as(columns), columns)
    return rows.flatten(1) if p.factored else p.flat(rows.flatten(1))
