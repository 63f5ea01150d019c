"""Scores of a few candidates for each query, which `GroupScores.rescore` has looked at again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from unde.errors import UndeError, unknown
from unde.methods import FinalContext, Method
from unde.notebook import facts, listed
from unde.scoring.documents import Pieces
from unde.scoring.range_checks import finite
from unde.scoring.ranked import Names, Ranked, WeightsLike
from unde.scoring.top import Best, Top, stable_top

Candidates = Top | Tensor | np.ndarray | int


@dataclass(frozen=True)
class Norms:
    """What `final` may ask about the pairs of queries and candidates."""

    queries: Tensor  # (Q, M) squared norms
    train: Tensor  # (n, M) of the examples that are candidates of some query
    leverage: Callable[[], Tensor]  # (n,)
    beside: Callable[[], Tensor]  # (n, ·)
    where: Tensor  # (Q, k): which of these n a candidate is

    def of(self, q: int, grouped: Tensor) -> FinalContext:
        """Of one query; `grouped` (M, M′) adds up groups."""
        here = self.where[q]
        return FinalContext(
            query_squares=lambda: self.queries[q : q + 1] @ grouped,
            train_squares=lambda: self.train[here] @ grouped,
            leverage=lambda: self.leverage()[here],
            extra_values=lambda: self.beside()[here],
        )


@dataclass(frozen=True, repr=False, eq=False)
class CandidateScores(Ranked):
    """Scores of Q queries against k candidates each, resolved into M parameter groups.

    Column r of `total()` and `by_group()` is the training example `indices[q, r]`; candidates are in the order of the
    training data. `top` ranks them as all examples would be ranked. Weights act as they do on all scores.
    """

    indices: Tensor  # (Q, k), ascending in each row
    linear: Tensor  # (Q, k, M) contributions before `final`
    norms: Norms
    method: Method
    names: list[str]  # of the M groups
    query_digests: list[str]
    provenance: dict[str, Any]
    memory: int
    ids: Sequence[Any] | None = None  # of all training examples
    query_ids: Sequence[Any] | None = None
    telling: Callable[[], list[int]] | None = None
    grouped: Tensor | None = None  # (M, M′), where groups were joined since
    called: ClassVar[str] = "candidates"

    @property
    def groups(self) -> list[str]:
        """The M group names, in order."""
        return list(self.names)

    @property
    def shape(self) -> tuple[int, int]:
        """Queries, and candidates of each."""
        return self.indices.shape[0], self.indices.shape[1]

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        q, k = self.shape
        return f"CandidateScores({self.method}, {q} queries × {k} candidates × {len(self.names)} groups)"

    def _repr_html_(self) -> str:
        q, k = self.shape
        found = {"method": str(self.method), "queries": f"{q:,}", "candidates of each": f"{k:,}"}
        return facts("Scores of candidates", found | {"groups": listed(self.groups)})

    def skipped(self) -> Tensor:
        """None are."""
        return torch.zeros(self.shape[1], dtype=torch.bool)

    def trained_on(self) -> list[int]:
        """Positions of the queries that are training examples, by content."""
        return [] if self.telling is None else self.telling()

    # --- scores ----------------------------------------------------------------------------------------

    def total(self, weights: WeightsLike = None) -> Tensor:
        """(Q, k) scores of the candidates; positive = proponent."""
        w = self.weights(weights)
        if self.method.groupwise:
            return self.by_group() @ w
        linear = self.linear @ w
        if self.method.linear:
            return linear
        return finite(self.finish(linear, w, slice(0, len(self)), slice(0, self.shape[1])), "scores")

    def by_group(self) -> Tensor:
        """(Q, k, M): the contributions of the groups, before `final`."""
        return self.contributions(slice(0, len(self)))

    def top(
        self,
        k: int,
        weights: WeightsLike = None,
        largest: bool = True,
        *,
        by: Names | None = None,
        queries: Names | None = None,
    ) -> Top:
        """The k best of the candidates of each query (largest=False: the k smallest scores)."""
        if by is not None:
            raise UndeError(
                "documents cannot be ranked by some of their pieces, and only candidates have scores here: rank "
                "documents with the scores of all examples, scores.top(k, by=…)"
            )
        return super().top(k, weights, largest, queries=queries)

    def best_examples(self, w: Tensor, k: int, largest: bool) -> Best:
        best = Best(len(self), k, largest)
        values, at = stable_top(self.total(w), k, largest)
        best.merge(slice(0, len(self)), 0, self.shape[1], values, self.indices.gather(1, at))
        return best

    def _summed(
        self, w: Tensor, k: int, largest: bool, queries: Pieces | None, train: Pieces | None, skipped: Tensor
    ) -> Top:
        raise UndeError(
            "pieces of one query have candidates of their own, whose scores cannot be added up: rescore a query as a "
            "whole, or ask scores.top(k, queries=…) of all examples"
        )

    def picked(self, queries: Tensor) -> CandidateScores:
        some = queries.tolist()
        names = None if self.query_ids is None else [self.query_ids[q] for q in some]
        norms = replace(self.norms, queries=self.norms.queries[queries], where=self.norms.where[queries])
        return replace(
            self,
            indices=self.indices[queries],
            linear=self.linear[queries],
            norms=norms,
            query_digests=[self.query_digests[q] for q in some],
            query_ids=names,
        )

    def regroup(self, groups: Mapping[str, Sequence[str]]) -> CandidateScores:
        """The same under coarser groups, {new name: names of groups of this one}."""
        number = {name: j for j, name in enumerate(self.names)}
        used = [name for names in groups.values() for name in names]
        for name in used:
            if name not in number:
                raise unknown("group", name, self.names)
        if sorted(used) != sorted(self.names):
            raise UndeError(
                f"{len(used)} groups are named, there are {len(self.names)}: expected each of them in one new group"
            )
        joined = torch.zeros(len(self.names), len(groups))
        for j, names in enumerate(groups.values()):
            joined[[number[name] for name in names], j] = 1
        before = joined if self.grouped is None else self.grouped @ joined
        return replace(self, linear=self.linear @ joined, names=list(groups), grouped=before)

    # --- blocks, for the weight learner -----------------------------------------------------------------

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """(candidates, (q, k, M) contributions), all at once."""
        yield slice(0, self.shape[1]), self.contributions(queries)

    def contributions(self, queries: slice) -> Tensor:
        """(q, k, M)"""
        if not self.method.groupwise:
            return self.linear[queries]
        some = range(*queries.indices(len(self)))
        return torch.cat([self.method.by_group(self.linear[q : q + 1], self._sides(q)) for q in some])

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        """Final scores of a block of queries and all their candidates; differentiable in `weights` (M,)."""
        if self.method.linear:
            return linear
        some = range(*queries.indices(len(self)))
        w = weights.to(linear)
        rows = [self.method.final(linear[i : i + 1], self._sides(q), w) for i, q in enumerate(some)]
        return torch.cat(rows)

    def _sides(self, q: int) -> FinalContext:
        grouped = torch.eye(len(self.names)) if self.grouped is None else self.grouped
        return self.norms.of(q, grouped)


def positions(top: Candidates, scores: Ranked, skipped: Tensor) -> Tensor:
    """(Q, k) training examples, ascending: of a `Top`, of an array of their positions, or the k best by `scores`."""
    if isinstance(top, int) and not isinstance(top, bool):
        top = scores.top(top)
    if isinstance(top, Top):
        ids, first = scores.ids, top.indices[0].tolist() if len(top) else []
        inside = all(0 <= i < scores.shape[1] for i in first)
        if not inside or list(top.ids[0]) != (first if ids is None else [ids[i] for i in first]):
            raise UndeError(
                "these are not the best training examples by such scores, but of another index, or documents: pass "
                "what scores.top(k) gives"
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
    if skipped[where].any():
        bad = int(where[skipped[where]][0])
        raise UndeError(f"example {bad} is a candidate, but was left out of the index: leave it out here too")
    return where
