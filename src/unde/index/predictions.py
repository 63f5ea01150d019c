"""Predictions of retrained models: the sum of a query's scores over each subset of the training data, group by group.

    prediction(s, q, j) = Σ_c η_c ⟨ g_j(q), [K_c Σ_{n ∈ s} g(n)]_j ⟩

Scores are linear in the training features, so S subset sums replace N examples: one pass over the stored features
serves all methods and dampings, and each of them costs one kernel applied to S rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unde.index.kernel_cache import KernelCache
from unde.index.reader import FeatureSource
from unde.index.scorer import Scorer
from unde.methods import Method


class Predictor:
    """Predictions of the same subsets and queries under any method.

    Args:
        scorer: The scorer of the index.
        queries: Query features, (C, Q, D).
        digests: Digests of the queries.
        masks: Subsets of the training examples, (S, N) bool.
    """

    def __init__(self, scorer: Scorer, queries: Tensor, digests: list[str], masks: np.ndarray) -> None:
        self.scorer, self.queries, self.digests = scorer, queries, digests
        self.members = torch.from_numpy(np.ascontiguousarray(masks)).float()  # (S, N)
        self._sums = self._sum_features()

    def predict(self, method: Method, terms: Sequence[int] | None = None) -> np.ndarray:
        """Predictions (S, Q, M) under a method; (S, Q, 1) where its scores are not sums over groups.

        Args:
            method: The method to score with.
            terms: The checkpoints that count; None for all.
        """
        if not method.linear or method.groupwise:
            total = self.scorer.scores(method, self.queries, self.digests).total()
            return (self.members.double() @ total.double().T).unsqueeze(2).numpy()
        m, groups = self.scorer.stored.manifest, self.scorer.groups
        out = torch.zeros(len(self.members), self.queries.shape[1], len(groups))
        for c in range(m.terms) if terms is None else terms:
            rows = self._apply_kernel(method, c)
            for j, columns in zip(groups.of(m.unit_names), m.columns):
                out[:, :, j] += m.checkpoint_weights[c] * (rows[:, columns] @ self.queries[c][:, columns].T)
        return out.numpy()

    def _sum_features(self) -> list[Tensor]:
        """Σ_{n ∈ s} g(n) for each checkpoint, (S, D), from one pass over the stored features."""
        stored, m = self.scorer.stored, self.scorer.stored.manifest
        sums = [torch.zeros(len(self.members), m.width, dtype=torch.float64) for _ in range(m.terms)]
        for s, rows in enumerate(m.shards):
            for total, block in zip(sums, stored.blocks(s)):
                total += self.members[:, rows] @ block
        return [total.float() for total in sums]

    def _apply_kernel(self, method: Method, checkpoint: int) -> Tensor:
        """K Σ_{n ∈ s} g(n), (S, D)."""
        cache = KernelCache(self.scorer.stored, method.kernel, checkpoint, self.scorer.executor)
        fitted = cache.fitted()
        combine = getattr(fitted, "combine", None)  # kernels in dual form have no need of the sums
        if combine is not None and cache.source == FeatureSource(self.scorer.stored, checkpoint):
            return combine(self.members)
        return fitted.apply(self._sums[checkpoint])
