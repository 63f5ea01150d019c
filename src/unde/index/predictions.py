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

from unde.groups import Groups
from unde.index.kernel_cache import KernelCache
from unde.index.reader import FeatureSource, IndexReader
from unde.index.scorer import Scorer
from unde.methods import Method
from unde.parallel import SERIAL, Executor


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
        self._sums = subset_sums(scorer.stored, self.members)

    def predict(self, method: Method, terms: Sequence[int] | None = None) -> np.ndarray:
        """Predictions (S, Q, M) under a method; (S, Q, 1) where its scores are not sums over groups.

        Args:
            method: The method to score with.
            terms: The checkpoints that count; None for all.
        """
        if not method.linear or method.groupwise:
            total = self.scorer.scores(method, self.queries, self.digests).total()
            return (self.members.double() @ total.double().T).unsqueeze(2).numpy()
        stored, executor = self.scorer.stored, self.scorer.executor
        etas = stored.manifest.checkpoint_weights
        chosen = range(stored.manifest.terms) if terms is None else terms
        out = torch.zeros(len(self.members), self.queries.shape[1], len(self.scorer.groups))
        for c in chosen:
            rows = apply_kernel(stored, method, c, self.members, self._sums[c], executor)
            for j, columns in group_columns(stored, self.scorer.groups):
                out[:, :, j] += etas[c] * (rows[:, columns] @ self.queries[c][:, columns].T)
        return out.numpy()


def subset_sums(stored: IndexReader, members: Tensor) -> list[Tensor]:
    """Σ_{n ∈ s} g(n) for each checkpoint, (S, D), from one pass over the stored features."""
    m = stored.manifest
    sums = [torch.zeros(len(members), m.width, dtype=torch.float64) for _ in range(m.terms)]
    for s, rows in enumerate(m.shards):
        for total, block in zip(sums, stored.blocks(s)):
            total += members[:, rows] @ block
    return [total.float() for total in sums]


def apply_kernel(
    stored: IndexReader,
    method: Method,
    checkpoint: int,
    members: Tensor,
    sums: Tensor,
    executor: Executor = SERIAL,
) -> Tensor:
    """K Σ_{n ∈ s} g(n), (S, D)."""
    files = KernelCache(stored, method.kernel, checkpoint, executor)
    fitted = files.fitted()
    combine = getattr(fitted, "combine", None)  # kernels in dual form have no need of the sums
    if combine is not None and files.source == FeatureSource(stored, checkpoint):
        return combine(members)
    return fitted.apply(sums)


def group_columns(stored: IndexReader, groups: Groups) -> list[tuple[int, slice]]:
    """(group, columns) of each parameter."""
    m = stored.manifest
    return list(zip(groups.of(m.unit_names), m.columns))
