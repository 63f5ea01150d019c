"""Group-resolved scores, streamed over training blocks; totals, top-k, regrouping (Eq. 4).

    linear(q, n; w) = Σ_c η_c Σ_j w_j ⟨ g_j(q), [K g(n)]_j ⟩         total = final(linear)

Weights act on the query side, so a weighted total is one matrix product, as an unweighted one is. Where K does not
mix layers it acts there too, after the weights: ⟨K(w ⊙ g(q)), g(n)⟩, and group j has ⟨K(1_j ⊙ g(q)), g(n)⟩.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unde import console
from unde.default_device import host_default
from unde.devices import CPU, put
from unde.errors import UndeError
from unde.groups import Groups
from unde.methods import FinalContext, Method
from unde.scoring import blocks as budget
from unde.scoring.base import GroupWeights, Scores, WeightsLike, pick
from unde.scoring.blocks import ScoreRange, TopK, check_underflow, cut, empty, in_range
from unde.scoring.candidates import Candidates, CandidateScores
from unde.scoring.query_side import QuerySide, multiply_groups, sum_products
from unde.scoring.train_features import TrainFeatures

RESULT_SHARE = 8  # results that take at most 1/8 of the memory of a device are copied from there at once


@host_default
@dataclass(frozen=True, repr=False, eq=False)
class GroupScores(Scores):
    """Scores of Q queries against N training examples, resolved into M parameter groups.

    `index.score(queries)` returns them. Nothing is computed before it is asked for, and training features are read in
    blocks within the memory budget of the index. Positive scores are proponents: training on the example lowered the
    loss of the query.

    Attributes:
        train: Features of the training examples, and their kernel.
        queries: Features of the queries, (C, Q, D).
        method: The method, such as `unde.methods.TRAK()`.
        partition: The groups of parameters.
        query_digests: A digest of the content of each query.
        provenance: What the scores were made from, JSON-able.
        memory: Memory budget in bytes.
        query_ids: Names of the queries, if they have some.
        default_weights: Weights of a calibration, used where none are passed.

    >>> scores = index.score(queries)  # doctest: +SKIP
    >>> scores.top(10).ids  # doctest: +SKIP
    >>> weights = unde.learn_weights(scores, k=10)  # doctest: +SKIP
    >>> index.score(others).total(weights)  # doctest: +SKIP
    """

    train: TrainFeatures
    queries: Tensor  # (C, Q, D)
    method: Method
    partition: Groups
    query_digests: list[str]
    provenance: dict[str, Any]
    memory: int
    query_ids: Sequence[Any] | None = None
    rescorer: Any = None  # model, task and data behind the scores
    default_weights: GroupWeights | None = None

    @property
    def groups(self) -> list[str]:
        """Names of the M groups, in order."""
        return list(self.partition.names)

    @property
    def device(self) -> torch.device:
        """Where contributions are computed."""
        return self.train.device

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and training examples, (Q, N)."""
        return self.queries.shape[1], self.train.examples

    @property
    def ids(self) -> Sequence[Any] | None:
        """The users' names of the training examples."""
        return self.train.ids

    def skipped(self) -> Tensor:
        """(N,) bool: training examples that were left out because of NaN gradients."""
        return self.train.skipped()

    def trained_on(self) -> list[int]:
        """Positions of the queries that are training examples, by content."""
        return self.train.find(self.query_digests)

    # --- scores ----------------------------------------------------------------------------------------

    def total(self, weights: WeightsLike = None) -> Tensor:
        """All scores, by one matrix product.

        They are held beside the memory budget; `top` stays within it.

        Args:
            weights: Weights of the groups, such as `unde.learn_weights` returns. None: those of a calibration, or all
                ones.

        Returns:
            Scores (Q, N); positive = proponent.

        Raises:
            UndeError: If weights do not fit the groups or were learned on these queries, or scores are beyond the
                range of float32.

        >>> from unde.scoring import from_arrays
        >>> from_arrays(torch.tensor([[[0.5, 0.25], [1.0, -1.0]]])).total([2.0, 0.0])
        tensor([[1., 2.]])
        """
        w = self.align_weights(weights)
        out = empty(self.shape, self._result_device(4 * math.prod(self.shape)))
        here = out if out.device == self.train.device else None
        for rows, q, part in self.totals(w, into=here):
            if here is None or not self.method.linear or self.method.groupwise:  # else it is in place
                out[q, rows] = part
        return out.cpu()

    def rank(self, w: Tensor, k: int, largest: bool) -> TopK:
        """The k best training examples of each query."""
        skipped, best = self.train.skipped(), TopK(len(self), k, largest, self.train.device)
        for rows, q, part in self.totals(w):
            if skipped[rows].any():
                part = part.masked_fill(put(skipped[rows], part.device), best.worst)
            best.update(q, rows.start, part)
        return best

    def by_group(self) -> Tensor:
        """Contributions (Q, N, M) of the groups, before `final`: they add up to the score of a linear method.

        Raises:
            UndeError: If they do not fit the memory budget.
        """
        q, n = self.shape
        m = len(self.partition)
        need = 4 * q * n * m
        if need > self.memory:
            raise UndeError(
                f"by_group() of {q} × {n} × {m} needs {console.size(need)}, the budget "
                f"is {console.size(self.memory)}: score fewer queries, regroup, or raise memory="
            )
        return self._contributions(slice(0, q), self._result_device(4 * q * m * n)).cpu()

    def rescore(
        self,
        top: Candidates,
        projection: str | None = None,
        *,
        index: Any = None,
        queries: Any = None,
    ) -> CandidateScores:
        """Scores of a few candidates from larger features: `scores.rescore(1000).top(10)`.

        Args:
            top: How many candidates of each query to take, or `scores.top(1000, weights)`, or their positions (Q, k).
            projection: The larger projection, by default "none", whole gradients. Gradients of queries and candidates
                are computed again, so the index needs its model, task and training data. For methods without a kernel
                (TracIn, cosine or not); with "none" for EKFAC and the diagonal metric too, whose kernel takes two
                passes over at most 4096 training examples the first time.
            index: Another index of the same model and examples, for other methods with a kernel, which is fitted to
                the features of all training examples. Only rows of candidates are read.
            queries: The queries that were scored, where these scores were made from their features.

        Returns:
            Scores of the candidates alone.

        Raises:
            UndeError: If model, task or data are missing, or `index` is one of other examples.

        >>> index.score(queries).rescore(1000).top(10)  # doctest: +SKIP
        """
        if self.rescorer is None:
            raise UndeError(
                "these scores do not know their queries and model: rescore what index.score returns"
            )
        return self.rescorer.rescore(self, top, projection, index, queries)

    def regroup(self, groups: Groups | Mapping[str, Sequence[str]]) -> GroupScores:
        """The same scores under other groups, without another pass over the model.

        Args:
            groups: Groups of the same parameters, or {new name: names of present groups}.

        Returns:
            The regrouped scores. Weights of a calibration belong to the groups of the index, and are dropped.

        Raises:
            UndeError: If a group is unknown, or a parameter is in none or several of them.

        >>> scores.regroup({"encoder": ["layer.0", "layer.1"], "head": ["fc"]})  # doctest: +SKIP
        """
        if not isinstance(groups, Groups):
            groups = self.partition.merge(groups)
        groups.of(self.train.units)
        if self.default_weights is not None:
            console.note(
                "the weights of the calibration belong to the groups of the index: these scores are unweighted"
            )
        return replace(self, partition=groups, default_weights=None)

    def select(self, queries: Tensor) -> GroupScores:
        """The scores of some of the queries, by number."""
        return replace(
            self,
            queries=self.queries[:, queries],
            query_digests=pick(self.query_digests, queries),
            query_ids=pick(self.query_ids, queries),
            rescorer=None if self.rescorer is None else self.rescorer.select(queries),
        )

    # --- blocks of contributions, for the weight learner --------------------------------------------------

    def contributions(self, queries: slice) -> Tensor:
        """(q, N, M) linear contributions of a block of queries; those to a group lie together in memory."""
        return self._contributions(queries, self.train.device)

    def _contributions(self, queries: slice, device: torch.device) -> Tensor:
        start, stop, _ = queries.indices(len(self))
        out = empty((stop - start, len(self.partition), self.train.examples), device)
        for block in cut(slice(start, stop), self._queries_at_once):
            here = out[block.start - start : block.stop - start]
            into = here.transpose(0, 1) if device == self.train.device else None
            for rows, part in self._stream(block, into):
                if into is None or self.method.groupwise:  # else it is in place
                    here.transpose(1, 2)[:, rows] = part
        return out.transpose(1, 2)

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """(training examples, contributions (q, n, M)), block by block within the memory budget.

        Those of a query to one group lie together in memory.
        """
        return self._stream(queries, None)

    def _stream(self, queries: slice, into: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """As `stream`, put `into` (M, q, N) unless that is None."""
        factors, (_, count, _) = self.query_side.factors(queries), self.queries[:, queries].shape
        m, sizes, cpu = len(self.partition), ScoreRange(count, self.train.device), self.train.device == CPU
        # An array takes a whole block at once: products of one group with few rows are slow.
        whole = into is not None and not self.method.groupwise
        row = 4 * self.queries.shape[0] * self.queries.shape[2]  # bytes
        sides = row * self.train.examples, row * self._most, self.queries.nbytes
        spare = budget.spare(*sides, self.block_memory)
        step = self.train.examples if whole else budget.rows_per_block(count, m, spare)
        norms = [[float(f.queries.norm()) for f in some] for some in factors] if cpu else []  # which waits
        reach = [max(some, default=0.0) for some in norms]
        for block_rows, blocks in self.train.runs():
            for rows in cut(block_rows, step):
                local = slice(rows.start - block_rows.start, rows.stop - block_rows.start)
                some = [block[local] for block in blocks]
                out = multiply_groups(
                    self.train.checkpoint_weights,
                    factors,
                    some,
                    (m, count, rows.stop - rows.start),
                    None if into is None else into[:, :, rows],
                )
                if not (cpu and sizes.ordinary and in_range(self.train.checkpoint_weights, reach, some)):
                    sizes.update(slice(0, count), out.transpose(0, 1))
                parts = out.permute(1, 2, 0)
                if self.method.groupwise:
                    parts = self.method.by_group(parts, self.final_context(queries, rows))
                yield rows, parts
        sizes.check()
        self._check_underflow(torch.arange(len(self))[queries][sizes.underflows()], torch.ones(m))

    def _check_underflow(self, suspects: Tensor, w: Tensor) -> None:
        """Raise if scores of suspects are zero only because they are below the range of float32."""
        if len(suspects):
            blocks = (block for _, block in self.train.runs())
            check_underflow(suspects, self.select_block(suspects).query_side.precondition(w), blocks)

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice | Tensor) -> Tensor:
        """Final scores from the linear part of a block; differentiable in `weights` (M,)."""
        if self.method.linear:
            return linear
        w = put(weights, linear.device, linear.dtype)
        return self.method.final(linear, self.final_context(queries, train), w)

    def final_context(self, queries: slice, train: slice | Tensor) -> FinalContext:
        """What `final` may ask about a block."""
        return FinalContext(
            query_squares=lambda: self.query_side.squared_norms[queries],
            train_squares=lambda: put(self.train_squares[train], self.train.device),
            leverage=lambda: put(self.leverage[train], self.train.device),
            extra_values=lambda: put(self.extra_values[train], self.train.device),
        )

    # --- blocks of totals ---------------------------------------------------------------------------------

    def totals(self, w: Tensor, into: Tensor | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
        """(training examples, queries, their scores), block by block.

        Linear scores are computed in place, in `into` (Q, N), if given.
        """
        query_blocks = self.query_blocks
        if self.method.groupwise:  # weights act on what is no longer linear in the features
            for streams in zip(*[self.stream(q) for q in query_blocks]):
                for q, (rows, parts) in zip(query_blocks, streams):
                    yield rows, q, parts @ put(w, parts.device)
            return
        seen, final = (ScoreRange(len(self), self.train.device) for _ in range(2))
        for block, factors, rows, blocks in self._facing(w, query_blocks):
            for q in cut(block, budget.scores_per_block(rows.stop - rows.start, self.block_memory)):
                some = factors[:, q.start - block.start : q.stop - block.start]
                out = into[q, rows] if into is not None and self.method.linear else None
                linear = seen.update(q, sum_products(some, blocks, out))
                if not self.method.linear:
                    linear = final.update(q, self.finish(linear, w, q, rows))
                yield rows, q, linear
        for found in (seen, final):
            found.check()
        self._check_underflow(seen.underflows(), w)

    def _facing(
        self, w: Tensor, query_blocks: Sequence[slice]
    ) -> Iterator[tuple[slice, Tensor, slice, list[Tensor]]]:
        """(queries, what of them is multiplied, training examples, their features), for all pairs of blocks.

        Where K acts on the training side, training features are read once, and weights are put on queries again for
        each block. Else K is applied to each block of queries once, and training features are read for each.
        """
        if len(query_blocks) > 1 and self.train.kernel_blocks is None:
            for rows, blocks in self.train.runs():
                for block in query_blocks:
                    yield block, self.select_block(block).query_side.precondition(w), rows, blocks
            return
        for block in query_blocks:
            factors = self.select_block(block).query_side.precondition(w)
            yield from ((block, factors, rows, blocks) for rows, blocks in self.train.runs())

    def select_block(self, queries: slice | Tensor) -> GroupScores:
        return replace(self, queries=self.queries[:, queries])

    @property
    def query_blocks(self) -> list[slice]:
        """Queries that are in memory together."""
        step = self._queries_at_once
        if self.method.groupwise:
            step = max(1, self.block_memory // (64 * len(self.partition) * self._most))
        return list(cut(slice(0, len(self)), step))

    @property
    def _queries_at_once(self) -> int:
        """As many as there is room for their features."""
        query_bytes = 4 * self.queries.shape[0] * self.queries.shape[2]
        return budget.queries_per_block(query_bytes, self.train.kernel_blocks is not None, self.block_memory)

    @property
    def block_memory(self) -> int:
        """Bytes that blocks of both sides and of scores may take: on a device that of the index."""
        there = self.train.block_memory
        return self.memory if there is None else there // 2

    def _result_device(self, need: int) -> torch.device:
        """Where results of so many bytes go: where blocks are, so that the host waits for all of them at once, or to
        the host."""
        fits = need <= self.block_memory // RESULT_SHARE
        return self.train.device if fits else CPU

    @property
    def _most(self) -> int:
        """Training examples of the largest block."""
        return max(rows.stop - rows.start for rows in self.train.cuts)

    # --- both sides ---------------------------------------------------------------------------------------

    @cached_property
    def query_side(self) -> QuerySide:
        return QuerySide(self.train, self.queries, self.partition)

    @cached_property
    def train_squares(self) -> Tensor:
        """(N, M) squared norms of the training features of each group."""
        out = torch.zeros(self.train.examples, len(self.partition))
        return out.index_add_(
            1, torch.tensor(self.partition.of(self.train.units)), self.train.squared_norms()
        )

    @cached_property
    def leverage(self) -> Tensor:
        return self.train.leverage()

    @cached_property
    def extra_values(self) -> Tensor:
        return self.train.extra_values()
