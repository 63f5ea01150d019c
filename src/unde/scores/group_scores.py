"""Group-resolved scores, streamed over training blocks; totals, top-k, regrouping (Eq. 4).

    linear(q, n; w) = Σ_c η_c Σ_j w_j ⟨ g_j(q), [K g(n)]_j ⟩         total = final(linear)

Weights act on the query side, so a weighted total is one matrix product, as an unweighted one is. Where K does not
mix layers it acts there too, after the weights: ⟨K(w ⊙ g(q)), g(n)⟩, and group j has ⟨K(1_j ⊙ g(q)), g(n)⟩.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unde.errors import UndeError, unknown
from unde.groups import Groups
from unde.methods import Method, Sides
from unde.notebook import facts, listed
from unde.scores import budget
from unde.scores.columns import cut, joined, mask, start_of
from unde.scores.ranked import Ranked, WeightsLike
from unde.scores.top import Best
from unde.scores.train_side import TrainSide
from unde.scores.within import Sizes, finite, refuse_lost


class Spread(Protocol):
    """Scores that other processes compute, each against some of the training examples."""

    def total(self, scores: GroupScores, w: Tensor) -> Tensor: ...

    def top(self, scores: GroupScores, w: Tensor, k: int, largest: bool) -> Best: ...


@dataclass(frozen=True, repr=False, eq=False)
class GroupScores(Ranked):
    """Scores of Q queries against N training examples, resolved into M parameter groups."""

    train: TrainSide
    queries: Tensor  # (C, Q, D)
    method: Method
    partition: Groups
    query_digests: list[str]
    provenance: dict[str, Any]
    memory: int
    judging: Callable[[Groups], Any] | None = None  # self-retrieval of the same method, where it can be run
    spread: Spread | None = None  # who else may compute
    query_ids: Sequence[Any] | None = None  # what the queries are called, if they have names

    def judge(self) -> Any:
        """What tells good weights from bad ones, or None without model and training data (`index.self_retrieval`)."""
        return None if self.judging is None else self.judging(self.partition)

    @property
    def groups(self) -> list[str]:
        """The M group names, in order."""
        return list(self.partition.names)

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.shape[1], self.train.examples

    def __len__(self) -> int:
        return self.queries.shape[1]

    def __repr__(self) -> str:
        q, n = self.shape
        return f"GroupScores({self.method}, {q} queries × {n} examples × {len(self.partition)} groups)"

    def _repr_html_(self) -> str:
        q, n = self.shape
        found = {"method": str(self.method), "queries": f"{q:,}", "training examples": f"{n:,}"}
        return facts("Scores", found | {"groups": listed(self.groups)})

    # --- scores ----------------------------------------------------------------------------------------

    def total(self, weights: WeightsLike = None) -> Tensor:
        """(Q, N) scores, one matrix product; positive = proponent. They come on top of the memory budget, where `top`
        stays within it."""
        w = self.weights(weights)
        if self.spread is not None:
            return self.spread.total(self, w)
        out = torch.empty(self.shape)
        for rows, q, part in self.totals(w):
            out[q, rows] = part
        return out

    def best_examples(self, w: Tensor, k: int, largest: bool) -> Best:
        return self.best(w, k, largest) if self.spread is None else self.spread.top(self, w, k, largest)

    def picked(self, queries: Tensor) -> GroupScores:
        digests = [self.query_digests[q] for q in queries.tolist()]
        names = None if self.query_ids is None else [self.query_ids[q] for q in queries.tolist()]
        return replace(self, queries=self.queries[:, queries], query_digests=digests, query_ids=names)

    @property
    def ids(self) -> Sequence[Any] | None:
        return self.train.ids

    def skipped(self) -> Tensor:
        return self.train.skipped()

    @property
    def telling(self) -> Callable[[], list[int]]:
        return partial(self.train.holding, self.query_digests)

    def by_group(self) -> Tensor:
        """(Q, N, M): the contributions of the groups, before `final`. For small problems: all in memory."""
        q, n = self.shape
        need = 4 * q * n * len(self.partition)
        if need > self.memory:
            raise UndeError(
                f"by_group() of {q} × {n} × {len(self.partition)} needs {need / 2**30:.3g} GiB, the budget "
                f"is {self.memory / 2**30:.3g} GiB: score fewer queries, regroup, or raise memory="
            )
        return self.contributions(slice(0, q))

    def trained_on(self) -> list[int]:
        """Positions of the queries that are training examples, by content."""
        return self.train.holding(self.query_digests)

    # --- blocks, for the weight learner -----------------------------------------------------------------

    @property
    def spare(self) -> int:
        """Bytes of the budget that are left beside the features of both sides."""
        row = 4 * self.queries.shape[0] * self.queries.shape[2]
        most = max((r.stop - r.start for r in self.train.cuts), default=0)
        return budget.spare(row * self.train.examples, row * most, self.queries.nbytes, self.memory)

    def contributions(self, queries: slice) -> Tensor:
        """(q, N, M) linear contributions of a block of queries."""
        count = len(range(*queries.indices(len(self))))
        out = torch.empty(count, self.train.examples, len(self.partition))
        for rows, part in self.stream(queries):
            out[:, rows] = part
        return out

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """(training rows, (q, n, M) contributions), block by block within the memory budget."""
        pieces, (_, count, _) = self._pieces(queries), self.queries[:, queries].shape
        m, sizes = len(self.partition), Sizes(count)
        step = budget.rows_at_once(count, m, self.spare)
        for rows, blocks in self.train.parts():
            for start in range(rows.start, rows.stop, step):
                stop = min(start + step, rows.stop)
                here = slice(start - rows.start, stop - rows.start)
                out = torch.zeros(m, count, stop - start)
                for eta, of_checkpoint, block in zip(self.train.checkpoint_weights, pieces, blocks):
                    for j, c, q in of_checkpoint:
                        out[j].addmm_(q, block[here, c].T, alpha=eta)
                sizes.see(slice(0, count), out.transpose(0, 1))
                parts, taken = out.permute(1, 2, 0).contiguous(), slice(start, stop)
                if self.method.groupwise:
                    parts = self.method.by_group(parts, self._sides(queries, taken))
                yield taken, parts
        if len(lost := sizes.lost()):
            self._refuse_lost(torch.arange(len(self))[queries][lost], torch.ones(m))

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice | Tensor) -> Tensor:
        """Final scores from the linear part of a block; differentiable in `weights` (M,)."""
        if self.method.linear:
            return linear
        return self.method.final(linear, self._sides(queries, train), weights.to(linear))

    def _sides(self, queries: slice, train: slice | Tensor) -> Sides:
        return Sides(
            query_squares=lambda: self._query_squares[queries],
            train_squares=lambda: self._train_squares[train],
            leverage=lambda: self._leverage[train],
            beside=lambda: self._beside[train],
        )

    def best(
        self, w: Tensor, k: int, largest: bool, only: int | None = None, seen: Sizes | None = None
    ) -> Best:
        """The k best of the training blocks that are looked at."""
        skipped, some = self.train.skipped(), self.train.some
        best = Best(len(self), k, largest, self.train.cuts[some[0]].start if some else 0)
        for rows, q, part in self.totals(w, only, seen):
            best.see(q, rows.start, part.masked_fill(skipped[rows], best.worst))
        return best

    def totals(
        self, w: Tensor, only: int | None = None, seen: Sizes | None = None
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """(training rows, queries, their scores), block by block, rows in order; of all blocks of queries, or one.

        How large they are is noted in `seen`, for who knows all of them.
        """
        taken = self.query_blocks[slice(None) if only is None else slice(only, only + 1)]
        if self.method.groupwise:  # weights act on what is no longer linear in the features
            for found in zip(*[self.stream(q) for q in taken]):
                for q, (rows, parts) in zip(taken, found):
                    yield rows, q, parts @ w
            return
        sizes, whole = seen or Sizes(len(self)), None
        if len(self.query_blocks) == 1:
            whole = self.multiplied(w)
        # Once, so what many queries are multiplied with is made each time: then there should be few of them.
        for rows, blocks in self.train.blocks() if whole is None else self.train.parts():
            for run in taken:
                scaled = whole if whole is not None else self._some(run).multiplied(w)
                for q in cut(run, budget.scores_at_once(rows.stop - rows.start, self.memory)):
                    own = slice(q.start - run.start, q.stop - run.start)
                    linear = sizes.see(q, _linear(scaled[:, own], blocks))
                    done = linear if self.method.linear else finite(self.finish(linear, w, q, rows), "scores")
                    del linear
                    yield rows, q, done
        if seen is None:
            self.refuse_lost(sizes, w)

    def refuse_lost(self, sizes: Sizes, w: Tensor) -> None:
        """Raises if scores are zero only because they are out of range."""
        if len(lost := sizes.lost()):
            self._refuse_lost(lost, w)

    def _some(self, queries: slice) -> GroupScores:
        return replace(self, queries=self.queries[:, queries])

    def _refuse_lost(self, lost: Tensor, w: Tensor) -> None:
        refuse_lost(lost, self.multiplied(w), (blocks for _, blocks in self.train.blocks()))

    def own(self, blocks: Tensor, train: Tensor) -> Tensor:
        """(n, M) contributions of queries to themselves: they are the training examples `train`, whose rows of blocks
        are (C, n, D)."""
        parts = torch.zeros(len(self), len(self.partition))
        pieces = self._pieces(slice(0, len(self)))
        for eta, of_checkpoint, t in zip(self.train.checkpoint_weights, pieces, blocks):
            for j, c, q in of_checkpoint:
                parts[:, j] += eta * torch.linalg.vecdot(q, t[:, c])
        square = torch.diag_embed(parts.T).permute(1, 2, 0)  # (n, n, M), zero off the diagonal
        made = self.method.by_group(square, self._sides(slice(0, len(self)), train))
        return made.diagonal().T

    # --- groups -----------------------------------------------------------------------------------------

    def regroup(self, groups: Groups | Mapping[str, Sequence[str]]) -> GroupScores:
        """The same scores under another partition of the parameters: no second pass over the model.

        `groups` is a Groups over the same parameters, or {new name: names of groups of this one}.
        """
        if not isinstance(groups, Groups):
            for name in (name for names in groups.values() for name in names):
                if name not in self.partition.members:
                    raise unknown("group", name, self.groups)
            members = self.partition.members
            groups = Groups({new: tuple(p for g in old for p in members[g]) for new, old in groups.items()})
        groups.of(self.train.units)
        return replace(self, partition=groups)

    # --- inside -----------------------------------------------------------------------------------------

    def scaled(self, w: Tensor) -> Tensor:
        """Query features with η_c and the weight of its group on each column, (C, Q, D)."""
        column = torch.empty(self.queries.shape[2])
        for j, c in self._runs:
            column[c] = w[j]
        eta = torch.tensor(self.train.checkpoint_weights, dtype=torch.float32)
        return self.queries * (eta.unsqueeze(1) * column).unsqueeze(1)

    def multiplied(self, w: Tensor) -> Tensor:
        """What is multiplied with blocks for weighted totals, (C, Q, D): K on the query side, where it is."""
        scaled = self.scaled(w)
        if self.train.mixes is None:
            return scaled
        return torch.stack([self.train.on_queries(c, rows) for c, rows in enumerate(scaled)])

    def _pieces(self, queries: slice) -> list[list[tuple[int, slice, Tensor]]]:
        """For each checkpoint: (group, columns, what of the queries is multiplied with them)."""
        features = self.queries[:, queries]
        if self.train.mixes is None:
            return [[(j, c, q[:, c]) for j, c in self._runs] for q in features]
        return [self._mixed(c, q) for c, q in enumerate(features)]

    def _mixed(self, checkpoint: int, q: Tensor) -> list[tuple[int, slice, Tensor]]:
        """K(1_j ⊙ g(q)), for as many groups j at once as share no block of K."""
        pieces = []
        for kept, runs in self._passes:
            made = self.train.on_queries(checkpoint, q if kept is None else q * kept)
            pieces += [(j, c, made[:, c]) for j, c in runs]
        return pieces

    @cached_property
    def _passes(self) -> list[tuple[Tensor | None, list[tuple[int, slice]]]]:
        """Masks over columns, no two groups of one block of K under the same, and the (group, columns) they reach.

        One mask that is None where groups are unions of blocks: K g(q) is cut then.
        """
        assert self.train.mixes is not None
        units = list(zip(self.partition.of(self.train.units), self.train.columns))
        starts = [c.start for _, c in units]
        own: list[list[slice]] = []
        reached: list[list[tuple[int, slice]]] = []
        for block in self.train.mixes:
            inside = [
                u for c in block for u in units[bisect_left(starts, c.start) : bisect_left(starts, c.stop)]
            ]
            for i, j in enumerate(dict.fromkeys(j for j, _ in inside)):
                if i == len(own):
                    own.append([])
                    reached.append([])
                own[i] += [c for owner, c in inside if owner == j]
                reached[i] += [(j, c) for c in block]
        masks = [None] if len(own) == 1 else [mask(c, self.queries.shape[2]) for c in own]
        return [(made, joined(sorted(runs, key=start_of))) for made, runs in zip(masks, reached)]

    @cached_property
    def _runs(self) -> list[tuple[int, slice]]:
        """(group, columns), where neighbouring units of one group are one run."""
        return joined(zip(self.partition.of(self.train.units), self.train.columns))

    @property
    def query_blocks(self) -> list[slice]:
        """Queries that are at work together, so that the budget holds."""
        rows, each = (
            max(r.stop - r.start for r in self.train.cuts),
            4 * self.queries.shape[0] * self.queries.shape[2],
        )
        step = budget.queries_at_once(each, self.train.mixes is not None, self.memory)
        if self.method.groupwise:
            step = max(1, self.memory // (64 * len(self.partition) * rows))
        return list(cut(slice(0, len(self)), step))

    @cached_property
    def _query_squares(self) -> Tensor:
        """(Q, M): as `train.squares`, of the queries."""
        out = torch.zeros(len(self), len(self.partition))
        for eta, q in zip(self.train.checkpoint_weights, self.queries):
            for j, c in self._runs:
                out[:, j] += eta * q[:, c].square().sum(1)
        return out

    @cached_property
    def _leverage(self) -> Tensor:
        return self.train.leverage()

    @cached_property
    def _beside(self) -> Tensor:
        return self.train.beside()

    @cached_property
    def _train_squares(self) -> Tensor:
        """(N, M)"""
        out = torch.zeros(self.train.examples, len(self.partition))
        return out.index_add_(1, torch.tensor(self.partition.of(self.train.units)), self.train.squares())


def _linear(scaled: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    out = scaled[0] @ blocks[0].T
    for q, block in zip(scaled[1:], blocks[1:]):
        out.addmm_(q, block.T)
    return out
