"""Weighted scores and their slopes straight from features, where contributions are too many to be kept.

A contribution is a product of features, C_q[n, j] = Σ_c η_c ⟨g_j(q), g_j(n)⟩ over the columns of group j, with K on one
side. So scores at some weights are one matrix product with weighted g(q), and sums Σ_n p_n C_q[n, j] are products of
g(q) with Σ_n p_n g(n), added up by group: neither needs the M numbers of each pair.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.scoring import GroupScores
from unde.scoring.query_side import join

_PAIRS = 2**25  # bytes of features that are multiplied at once for pairs


class FromFeatures:
    """The training features of some scores, and what of the queries is multiplied with them."""

    def __init__(self, source: GroupScores) -> None:
        self._source = source
        runs = join(zip(source.partition.of(source.train.units), source.train.columns))
        runs.sort(key=lambda run: run[1].start)
        self._owner = torch.tensor([j for j, _ in runs])
        self._starts = np.array([c.start for _, c in runs])
        self.query_bytes = 12 * source.queries.shape[0] * source.queries.shape[2]

    @classmethod
    def of(cls, source: Any) -> FromFeatures | None:
        """None for scores that are no plain sums over groups, or whose K mixes groups."""
        if not isinstance(source, GroupScores) or not source.method.linear or source.method.groupwise:
            return None
        owners = list(zip(source.partition.of(source.train.units), source.train.columns))
        for block in source.train.kernel_blocks or ():
            inside = {j for j, c in owners for b in block if c.start < b.stop and b.start < c.stop}
            if len(inside) > 1:
                return None
        return cls(source)

    def scores(self, which: Tensor, weights: Tensor) -> Tensor:
        """(q, N)"""
        out = torch.empty(len(which), self._source.shape[1])
        for rows, q, part in self._source.select(which).totals(weights.float()):
            out[q, rows] = part
        return out

    def pulled(self, which: Tensor, pull: Tensor, picks: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_n pull[q, n] C_q[n], (q, M), and the contributions of picked examples, (q, r, M)."""
        train, groups = self._source.train, len(self._source.groups)
        features = self._source.queries[:, which]  # (C, q, D)
        if train.kernel_blocks is not None:
            features = torch.stack([train.apply_kernel(c, q) for c, q in enumerate(features)])
        sums, rows = torch.zeros_like(features), torch.zeros(*picks.shape, groups)
        for here, blocks in train.blocks():
            query, place = ((picks >= here.start) & (picks < here.stop)).nonzero(as_tuple=True)
            for c, (eta, block) in enumerate(zip(train.checkpoint_weights, blocks)):
                sums[c].addmm_(pull[:, here], block, alpha=eta)
                step = max(1, _PAIRS // (4 * block.shape[1]))
                for q, p in zip(query.split(step), place.split(step)):
                    rows[q, p] += self._by_group(features[c, q] * block[picks[q, p] - here.start]).mul_(eta)
        return self._by_group((features * sums).sum(0)), rows

    def _by_group(self, products: Tensor) -> Tensor:
        """Sums over the columns of each group: (n, D) → (n, M)."""
        runs = torch.from_numpy(np.add.reduceat(products.numpy(), self._starts, axis=1))
        return torch.zeros(len(products), len(self._source.groups)).index_add_(1, self._owner, runs)
