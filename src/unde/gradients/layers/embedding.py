"""Embeddings: a linear layer on one-hot rows, so the row side of the projection is a lookup."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from unde.gradients.layers.base import FeatureSink, Rule, register, register_where
from unde.projection import Projection


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
