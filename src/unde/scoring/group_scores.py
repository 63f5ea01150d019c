"""Group-resolved scores, streamed over training blocks; totals, top-k, regrouping (Eq. 4).

    linear(q, n; w) = Σ_c η_c Σ_j w_j ⟨ g_j(q), [K g(n)]_j ⟩         total = final(linear)

Weights act on the query side, so a weighted total is one matrix product, as an unweighted one is. Where K does not
mix layers it acts there too, after the weights: ⟨K(w ⊙ g(q)), g(n)⟩, and group j has ⟨K(1_j ⊙ g(q)), g(n)⟩.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unde import console
from unde.errors import UndeError, unknown
from unde.groups import Groups
from unde.methods import FinalContext, Method
from unde.notebook import facts, listed
from unde.pages import large
from unde.scoring import budget
from unde.scoring.blocking import cut
from unde.scoring.candidates import Candidates, CandidateScores
from unde.scoring.query_side import Piece, QuerySide
from unde.scoring.range_checks import HUGE, Sizes, finite, refuse_lost
from unde.scoring.ranked import Aligned, Ranked, WeightsLike
from unde.scoring.top import Best
from unde.scoring.train_side import TrainSide
from unde.store.dequantize import Block, in_runs
from unde.store.limbs import Factor


class Spread(Protocol):
    """Scores that other processes compute, each against some of the training examples."""

    def total(self, scores: GroupScores, w: Tensor) -> Tensor: ...

    def top(self, scores: GroupScores, w: Tensor, k: int, largest: bool) -> Best: ...


class Again(Protocol):
    """What scores were asked with, to ask again."""

    def of(self, queries: Tensor) -> Again: ...

    def rescored(
        self, scores: GroupScores, top: Candidates, projection: str | None, index: Any, queries: Any
    ) -> CandidateScores: ...


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
    spread: Spread | None = None  # who else may compute
    query_ids: Sequence[Any] | None = None  # what the queries are called, if they have names
    again: Again | None = None  # how the same queries are asked about once more
    default_weights: Aligned | None = None  # of a calibration: used where no weights are named

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
        out = large(*self.shape)
        for rows, q, part in self.totals(w, into=out):
            if part.data_ptr() != out[q, rows].data_ptr():
                out[q, rows] = part
        return out

    def best_examples(self, w: Tensor, k: int, largest: bool) -> Best:
        return self.best(w, k, largest) if self.spread is None else self.spread.top(self, w, k, largest)

    def picked(self, queries: Tensor) -> GroupScores:
        digests = [self.query_digests[q] for q in queries.tolist()]
        names = None if self.query_ids is None else [self.query_ids[q] for q in queries.tolist()]
        again = None if self.again is None else self.again.of(queries)
        return replace(
            self, queries=self.queries[:, queries], query_digests=digests, query_ids=names, again=again
        )

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
        out = large(q, len(self.partition), n)  # of a query a matrix (M, n): turning it takes as long
        whole = out.transpose(1, 2)
        for rows, part in self._streamed(slice(0, q), out.transpose(0, 1)):
            if self.method.groupwise:
                whole[:, rows] = part
        return whole

    def trained_on(self) -> list[int]:
        """Positions of the queries that are training examples, by content."""
        return self.train.holding(self.query_digests)

    def rescore(
        self,
        top: Candidates,
        projection: str | None = None,
        *,
        index: Any = None,
        queries: Any = None,
    ) -> CandidateScores:
        """The same scores of a few candidates, from larger features: `scores.rescore(1000).top(10)`.

        `top` is how many candidates of each query are taken, or `scores.top(1000, weights)`, or their positions (Q, k),
        wherever these come from. `projection` is the larger one, by default "none", whole gradients: those of queries
        and of each candidate are computed anew, so model, task and training data must be at hand. That is for methods
        without a kernel (TracIn, cosine or not). Kernels are fitted to the features of all training examples: for
        them, `index` is another index of the same model and examples, of whose features only rows of candidates are
        read. `queries` are those that were scored, where `scores` were made from their features.
        """
        if self.again is None:
            raise UndeError(
                "these scores do not know what they were asked about: rescore what index.score gives"
            )
        return self.again.rescored(self, top, projection, index, queries)

    # --- blocks, for the weight learner -----------------------------------------------------------------

    @property
    def spare(self) -> int:
        """Bytes of the budget that are left beside the features of both sides."""
        row = 4 * self.queries.shape[0] * self.queries.shape[2]
        most = max((r.stop - r.start for r in self.train.cuts), default=0)
        return budget.spare(row * self.train.examples, row * most, self.queries.nbytes, self.memory)

    def contributions(self, queries: slice) -> Tensor:
        """(q, N, M) linear contributions of a block of queries; those of an example lie together in memory."""
        count = len(range(*queries.indices(len(self))))
        out = large(count, self.train.examples, len(self.partition))
        for rows, part in self.stream(queries):
            out[:, rows] = part
        return out

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """(training rows, (q, n, M) contributions), block by block within the memory budget. Those of a query to one
        group lie together in memory."""
        return self._streamed(queries, None)

    def _streamed(self, queries: slice, into: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """The same, put `into` (M, q, N) if that is there."""
        pieces, (_, count, _) = self.asked.pieces(queries), self.queries[:, queries].shape
        m, sizes = len(self.partition), Sizes(count)
        # What has its place in memory is made of a whole block at once: products of one group with few rows are slow.
        single = not any(piece.joint for own in pieces for piece in own)
        whole = into is not None and single and not self.method.groupwise
        step = self.train.examples if whole else budget.rows_at_once(count, m, self.spare)
        reach = [max((float(p.queries.norm()) for p in own), default=0.0) for own in pieces]
        for rows, blocks in self.train.packed_blocks():
            for start in range(rows.start, rows.stop, step):
                taken = slice(start, min(start + step, rows.stop))
                here = slice(taken.start - rows.start, taken.stop - rows.start)
                some = [block[here] for block in blocks]
                out = self._multiply(pieces, some, count, None if into is None else into[:, :, taken])
                if not (sizes.ordinary and self._in_range(reach, some)):
                    sizes.see(slice(0, count), out.transpose(0, 1))
                parts = out.permute(1, 2, 0)
                if self.method.groupwise:
                    parts = self.method.by_group(parts, self._sides(queries, taken))
                yield taken, parts
        if len(lost := sizes.lost()):
            self._refuse_lost(torch.arange(len(self))[queries][lost], torch.ones(m))

    def _in_range(self, reach: list[float], blocks: Sequence[Block]) -> bool:
        """Whether no product of blocks with queries of such norms is beyond float32: then it need not be read again."""
        norms = [float(block.norm()) if isinstance(block, Tensor) else math.inf for block in blocks]
        bounds = zip(self.train.checkpoint_weights, reach, norms)
        return sum(abs(eta) * r * norm for eta, r, norm in bounds) < HUGE

    def _multiply(
        self, pieces: list[list[Piece]], blocks: Sequence[Block], count: int, out: Tensor | None
    ) -> Tensor:
        """The contributions (M, q, n) to `count` queries of blocks (n, D), one for each checkpoint; in `out`, if that
        is there."""
        m, n = len(self.partition), len(blocks[0])
        for c, (eta, own, block) in enumerate(zip(self.train.checkpoint_weights, pieces, blocks)):
            for rows, features in in_runs(block):
                for piece in own:
                    all_of_it = (piece.at.groups, rows) == (slice(0, m), slice(0, n))
                    made = piece.product(features) if out is None and all_of_it else None
                    if made is not None:  # nothing else is there: it need not be copied
                        out = made if eta == 1 else made.mul_(eta)
                        continue
                    out = torch.empty(m, count, n) if out is None else out
                    piece.multiply(out[piece.at.groups, :, rows], features, eta, c > 0 or piece.at.more)
        out = torch.empty(m, count, n) if out is None else out
        for j in set(range(m)) - {j for p in pieces[0] for j in range(m)[p.at.groups]}:
            out[j].zero_()  # a group that has no columns
        return out

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice | Tensor) -> Tensor:
        """Final scores from the linear part of a block; differentiable in `weights` (M,)."""
        if self.method.linear:
            return linear
        return self.method.final(linear, self._sides(queries, train), weights.to(linear))

    def _sides(self, queries: slice, train: slice | Tensor) -> FinalContext:
        return FinalContext(
            query_squares=lambda: self.asked.squares[queries],
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
            out = skipped[rows]
            best.see(q, rows.start, part.masked_fill(out, best.worst) if out.any() else part)
        return best

    def totals(
        self, w: Tensor, only: int | None = None, seen: Sizes | None = None, into: Tensor | None = None
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """(training rows, queries, their scores), block by block, rows in order; of all blocks of queries, or one.

        How large they are is noted in `seen`, for who knows all of them. Those that are products alone are put `into`
        (Q, N), if that is there.
        """
        taken = self.query_blocks[slice(None) if only is None else slice(only, only + 1)]
        if self.method.groupwise:  # weights act on what is no longer linear in the features
            for found in zip(*[self.stream(q) for q in taken]):
                for q, (rows, parts) in zip(taken, found):
                    yield rows, q, parts @ w
            return
        sizes, whole = seen or Sizes(len(self)), None
        if len(self.query_blocks) == 1:
            whole = self.asked.factors(w)
        # What many queries are multiplied with is read in float32 again and again, that of few once as it is stored.
        read = self.train.blocks if whole is None else self.train.packed_blocks
        for rows, blocks in read():
            for run in taken:
                scaled = whole if whole is not None else self._some(run).asked.factors(w)
                for q in cut(run, budget.scores_at_once(rows.stop - rows.start, self.memory)):
                    own = slice(q.start - run.start, q.stop - run.start)
                    out = into[q, rows] if into is not None and self.method.linear else None
                    linear = sizes.see(q, _linear(scaled, own, blocks, out))
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
        refuse_lost(lost, self.asked.multiplied(w), (blocks for _, blocks in self.train.blocks()))

    def own(self, blocks: Tensor, train: Tensor) -> Tensor:
        """(n, M) contributions of queries to themselves: they are the training examples `train`, whose rows of blocks
        are (C, n, D)."""
        parts = torch.zeros(len(self), len(self.partition))
        pieces = self.asked.pieces(slice(0, len(self)))
        for eta, of_checkpoint, t in zip(self.train.checkpoint_weights, pieces, blocks):
            for at, q, _ in of_checkpoint:
                both = torch.linalg.vecdot(q, t[:, at.columns].unflatten(1, (len(q), -1)).transpose(0, 1))
                parts[:, at.groups] += eta * both.T
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
        if self.default_weights is not None:
            console.note(
                "the weights of the calibration belong to the groups of the index: these scores are unweighted"
            )
        return replace(self, partition=groups, default_weights=None)

    # --- inside -----------------------------------------------------------------------------------------

    @cached_property
    def asked(self) -> QuerySide:
        return QuerySide(self.train, self.queries, self.partition)

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


def _linear(scaled: Sequence[Factor], queries: slice, blocks: Sequence[Block], out: Tensor | None) -> Tensor:
    out = torch.empty(queries.stop - queries.start, len(blocks[0])) if out is None else out
    for c, (factor, block) in enumerate(zip(scaled, blocks)):
        factor.multiply(out, queries, block, add=c > 0)
    return out
