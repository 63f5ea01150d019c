"""Scores of a few candidates of each query, which `GroupScores.rescore` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from unde.default_device import host_default
from unde.errors import UndeError
from unde.methods import FinalContext, Method
from unde.scoring.base import Names, Scores, WeightsLike, pick
from unde.scoring.blocks import TopK, check_finite, stable_top
from unde.scoring.documents import Pieces
from unde.scoring.top import Top

Candidates = Top | Tensor | np.ndarray | int


@dataclass(frozen=True)
class CandidateNorms:
    """What `final` may ask about the pairs of queries and candidates."""

    queries: Tensor  # (Q, M) squared norms
    train: Tensor  # (n, M) of the examples that are candidates of some query
    leverage: Callable[[], Tensor]  # (n,)
    extra_values: Callable[[], Tensor]  # (n, ·)
    where: Tensor  # (Q, k): which of these n a candidate is

    def select(self, queries: Tensor) -> CandidateNorms:
        return replace(self, queries=self.queries[queries], where=self.where[queries])

    def final_context(self, q: int, joint: Tensor) -> FinalContext:
        """Of one query; `joint` (M, M′) adds up groups."""
        rows = self.where[q]
        return FinalContext(
            query_squares=lambda: self.queries[q : q + 1] @ joint,
            train_squares=lambda: self.train[rows] @ joint,
            leverage=lambda: self.leverage()[rows],
            extra_values=lambda: self.extra_values()[rows],
        )


@host_default
@dataclass(frozen=True, repr=False, eq=False)
class CandidateScores(Scores):
    """Scores of Q queries against k candidates each, resolved into M parameter groups.

    Column r of `total()` and `by_group()` is the training example `indices[q, r]`; candidates are in the order of the
    training data. `top` ranks them as all examples would be ranked. Weights act as they do on all scores.
    """

    indices: Tensor  # (Q, k), ascending in each row
    linear: Tensor  # (Q, k, M) contributions before `final`
    norms: CandidateNorms
    method: Method
    names: list[str]  # of the M groups
    query_digests: list[str]
    provenance: dict[str, Any]
    memory: int
    ids: Sequence[Any] | None = None  # of all training examples
    query_ids: Sequence[Any] | None = None
    trained_on: Callable[[], list[int]] = list
    joint: Tensor | None = None  # (M, M′), where groups were joined since
    noun: ClassVar[str] = "candidates"
    title: ClassVar[str] = "Scores of candidates"

    @property
    def groups(self) -> list[str]:
        """Names of the M groups, in order."""
        return list(self.names)

    @property
    def shape(self) -> tuple[int, int]:
        """Queries, and candidates of each."""
        return self.indices.shape[0], self.indices.shape[1]

    # --- scores ----------------------------------------------------------------------------------------

    def total(self, weights: WeightsLike = None) -> Tensor:
        """(Q, k) scores of the candidates; positive = proponent."""
        w = self.align_weights(weights)
        if self.method.groupwise:
            return self.by_group() @ w
        linear = self.linear @ w
        if self.method.linear:
            return linear
        return check_finite(self.finish(linear, w, slice(0, len(self)), slice(0, self.shape[1])), "scores")

    def by_group(self) -> Tensor:
        """(Q, k, M) contributions of the groups, before `final`."""
        return self.contributions(slice(0, len(self)))

    def _name_documents(self, by: Names | None) -> None:
        if by is not None:
            raise UndeError(
                "documents cannot be ranked by some of their pieces, and only candidates have scores here: rank "
                "documents with the scores of all examples, scores.top(k, by=…)"
            )

    def rank(self, w: Tensor, k: int, largest: bool) -> TopK:
        best = TopK(len(self), k, largest)
        values, at = stable_top(self.total(w), k, largest)
        best.merge(slice(0, len(self)), self.shape[1], values, self.indices.gather(1, at))
        return best

    def _rank_documents(
        self, w: Tensor, k: int, largest: bool, queries: Pieces | None, train: Pieces | None, skipped: Tensor
    ) -> Top:
        raise UndeError(
            "pieces of one query have candidates of their own, whose scores cannot be added up: rescore a query as a "
            "whole, or ask scores.top(k, queries=…) of all examples"
        )

    def select(self, queries: Tensor) -> CandidateScores:
        """The scores of some of the queries, by number."""
        return replace(
            self,
            indices=self.indices[queries],
            linear=self.linear[queries],
            norms=self.norms.select(queries),
            query_digests=pick(self.query_digests, queries),
            query_ids=pick(self.query_ids, queries),
        )

    def regroup(self, groups: Mapping[str, Sequence[str]]) -> CandidateScores:
        """The same scores under coarser groups, {new name: names of present groups}."""
        joint = self._joint_groups(groups)
        before = joint if self.joint is None else self.joint @ joint
        return replace(self, linear=self.linear @ joint, names=list(groups), joint=before)

    # --- blocks, for the weight learner -----------------------------------------------------------------

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """(candidates, (q, k, M) contributions), all at once."""
        yield slice(0, self.shape[1]), self.contributions(queries)

    def contributions(self, queries: slice) -> Tensor:
        """(q, k, M)"""
        if not self.method.groupwise:
            return self.linear[queries]
        some = range(*queries.indices(len(self)))
        return torch.cat([self.method.by_group(self.linear[q : q + 1], self._context(q)) for q in some])

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        """Final scores of a block of queries and all their candidates; differentiable in `weights` (M,)."""
        if self.method.linear:
            return linear
        some, w = range(*queries.indices(len(self))), weights.to(linear)
        return torch.cat(
            [self.method.final(linear[i : i + 1], self._context(q), w) for i, q in enumerate(some)]
        )

    def _context(self, q: int) -> FinalContext:
        return self.norms.final_context(q, torch.eye(len(self.names)) if self.joint is None else self.joint)


def candidate_positions(top: Candidates, scores: Scores) -> Tensor:
    """(Q, k) training examples, ascending: of a `Top`, of an array of positions, or the k best by `scores`."""
    if isinstance(top, int) and not isinstance(top, bool):
        top = scores.top(top)
    if isinstance(top, Top):
        ids, first = scores.ids, top.indices[0].tolist() if len(top) else []
        inside = all(0 <= i < scores.shape[1] for i in first)
        if not inside or list(top.ids[0]) != (first if ids is None else [ids[i] for i in first]):
            raise UndeError(
                "these are not the best training examples by such scores, but of another index, or documents: pass "
                "what scores.top(k) returns"
            )
        top = top.indices
    where = torch.as_tensor(top)
    q, n = scores.shape
    if where.ndim != 2 or len(where) != q or not where.shape[1] or where.is_floating_point():
        raise UndeError(
            f"candidates of shape {tuple(where.shape)} for {q} queries: expected ({q}, k) positions of training "
            "examples, what scores.top(k) gives, or k itself"
        )
    where = where.long().sort(1).values
    if int(where[:, 0].min()) < 0 or int(where[:, -1].max()) >= n:
        raise UndeError(f"candidates must be positions of training examples, from 0 to {n - 1}")
    if (where[:, 1:] == where[:, :-1]).any():
        row = int((where[:, 1:] == where[:, :-1]).any(1).nonzero()[0])
        raise UndeError(f"an example is there twice among the candidates of query {row}: expected each once")
    skipped = scores.skipped()
    if skipped[where].any():
        bad = int(where[skipped[where]][0])
        raise UndeError(f"example {bad} is a candidate, but was left out of the index: leave it out here too")
    return where
