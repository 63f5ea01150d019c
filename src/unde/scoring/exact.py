"""Scores that are computed as the training data stream by, as `unde.attribute` gives them: in memory or in a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unde.console import size
from unde.default_device import host_default
from unde.errors import UndeError, explain
from unde.methods import FinalContext
from unde.scoring import diagnostics
from unde.scoring.arrays import Array, ArrayScores
from unde.scoring.base import WeightsLike, pick
from unde.scoring.blocks import check_finite
from unde.scoring.data_splits import shared
from unde.scoring.documents import Pieces
from unde.scoring.top import Top

MOST = 2**34  # bytes of contributions that are kept, in memory or in a file
SHARE = 4  # in memory they take at most 1/4 of the budget


@dataclass(frozen=True)
class PairNorms:
    """Squared norms of whole gradients in each group, which cosines are divided by."""

    queries: Tensor  # (Q, M)
    train: Tensor  # (N, M)


@host_default
@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class ExactScores(ArrayScores):
    """Scores of Q queries against N training examples, from whole gradients.

    `unde.attribute` returns them. They can do what the scores of an index do; contributions are in memory, or in a
    temporary file that goes with them.
    """

    title = "Exact scores"
    query_digests: list[str]
    train_digests: Sequence[str]
    norms: PairNorms

    def trained_on(self) -> list[int]:
        """Positions of the queries that are training examples, by content."""
        return shared(self.query_digests, self.train_digests)

    def total(self, weights: WeightsLike = None) -> Tensor:
        """(Q, N) scores, held beside the memory budget; positive = proponent."""
        w, everything = self.align_weights(weights), slice(None)
        return check_finite(self.finish(super().total(w), w, everything, everything), "scores")

    def by_group(self) -> Tensor:
        """Contributions (Q, N, M) of the groups, before cosines are taken.

        Raises:
            UndeError: If they are in a file and do not fit the memory budget.
        """
        need = 4 * self.values.shape[0] * self.values.shape[1] * self.values.shape[2]
        if not isinstance(self.values, Tensor) and need > self.memory:
            raise UndeError(
                f"by_group() of {' × '.join(map(str, self.values.shape))} needs {size(need)}, the budget is "
                f"{size(self.memory)}: use select(queries), coarser groups=, or raise memory="
            )
        return super().by_group()

    def select(self, queries: Tensor) -> ExactScores:
        """The scores of some of the queries, by number."""
        some = super().select(queries)
        assert isinstance(some, ExactScores)
        norms = PairNorms(self.norms.queries[queries], self.norms.train)
        return replace(some, query_digests=pick(self.query_digests, queries), norms=norms)

    def regroup(self, groups: Mapping[str, Sequence[str]]) -> ExactScores:
        """The same scores under coarser groups, {new name: names of present groups}."""
        joint = self._joint_groups(groups)
        values = empty_scores((*self.shape, len(groups)), self.memory)
        for q in self._query_blocks(16):
            for rows, parts in self.stream(q):
                values[q, rows] = parts @ joint if isinstance(values, Tensor) else (parts @ joint).numpy()
        norms = PairNorms(self.norms.queries @ joint, self.norms.train @ joint)
        return replace(self, values=values, names=list(groups), norms=norms)

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        """Final scores of a block from their linear part; differentiable in `weights` (M,)."""
        if self.method.linear:
            return linear
        sides = FinalContext(
            query_squares=lambda: self.norms.queries[queries],
            train_squares=lambda: self.norms.train[train],
            leverage=_no_leverage,
            extra_values=_no_leverage,
        )
        return self.method.final(linear, sides, weights.to(linear))

    def diagnose(self, top: Top | None = None, queries: Pieces | None = None) -> list[str]:
        """What to know before the scores are read, a sentence each: gradients of zero, lists that are all alike.

        Args:
            top: `scores.top(10)`, whose lists are compared; without it they are not.
            queries: Which query each row is a piece of, where queries were cut.

        >>> scores.diagnose(scores.top(10))  # doctest: +SKIP
        """
        flat = int((~self.norms.train.any(1)).sum())
        found = [diagnostics.describe_zero_examples(flat, self.shape[1])] if flat else []
        zero = (~self.norms.queries.any(1)).nonzero()[:, 0].tolist()
        names = range(self.shape[0]) if self.query_ids is None else self.query_ids
        return found + diagnostics.describe_scores(zero, names, queries, top, self.shape[1], self.ids)


def empty_scores(shape: tuple[int, int, int], memory: int) -> Array:
    """Zeros (Q, N, M): in memory if they take at most a quarter of the budget, else in a temporary file."""
    need = 4 * shape[0] * shape[1] * shape[2]
    if need <= memory // SHARE:
        return torch.zeros(shape)
    message = (
        f"there is no room for {need / 2**30:.3g} GiB of scores in {tempfile.gettempdir()} ({{why}}): set TMPDIR to "
        "another folder, raise memory= to keep them in memory, ask fewer queries, or use coarser groups="
    )
    with explain(message, OSError), tempfile.TemporaryFile(prefix="unde-") as file:
        if hasattr(os, "posix_fallocate"):  # else a full disk is noticed by a signal
            os.posix_fallocate(file.fileno(), 0, need)
        return np.memmap(file, np.float32, "w+", shape=shape)


def _no_leverage() -> Tensor:
    raise UndeError(
        "these scores know nothing of examples but their gradients: build an index for this method"
    )
