"""Contributions (Q, N, M) read within a memory budget: cached if they fit, streamed on every pass if not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unde import console
from unde.devices import CPU, put
from unde.errors import UndeError
from unde.scoring import GroupScores
from unde.scoring.base import Scores

CACHE_SHARE = 2  # contributions that are held take at most one part in so many of the budget
SPAN_SHARE = 4  # what callers hold for the queries of a span takes at most one part in so many
_NOISE_ROWS = 1024  # training examples that share a random stream
Blocks = Iterable[tuple[slice, Tensor]]


@dataclass(frozen=True)
class Span:
    """A run of neighbouring queries, and which of them are wanted."""

    queries: slice  # of the source
    wanted: Tensor  # (q,) rows within the run
    places: slice  # where these are in the sorted list of all wanted queries


class Contributions:
    """The (Q, N, M) contributions of a source: checked to be finite, with noise on request.

    They are cached if they fit in half the source's budget together with the M×M matrices that the
    fixed-point solver needs for each query.
    """

    def __init__(self, source: Scores, noise: float = 0.0, seed: int = 0) -> None:
        self.source = source
        self.queries, self.examples = source.shape
        self.groups = len(source.groups)
        self.memory = source.memory
        self.device = getattr(source, "device", CPU)  # where contributions come
        self.query_bytes = 4 * self.examples * self.groups
        self._noise: Noise | None = None
        self._cache: Tensor | None = None
        self.low, self.high = math.inf, -math.inf  # of all contributions read so far
        self._finite = torch.zeros(self.queries, dtype=torch.bool)  # queries all of whose blocks were checked
        if noise > 0:
            passes = self.sweep("measuring the contributions", torch.arange(self.queries), 0)
            deviation = group_deviation(block for _, blocks in passes for _, block in blocks)
            self._noise = Noise(noise * deviation, seed)
        if self.queries * (self.query_bytes + 8 * self.groups**2) <= self.memory // CACHE_SHARE:
            self._cache = self.load(slice(0, self.queries))

    def sweep(self, label: str, wanted: Tensor, query_bytes: int) -> Iterator[tuple[Span, Blocks]]:
        """Pass once over the sorted `wanted` queries: spans of them, each with its (q, n, M) blocks.

        `query_bytes` is what the caller holds for each query of a span; it bounds the spans' lengths.
        """
        with console.progress(label, self.queries * self.examples, unit="scores") as advance:
            for span in self._spans(wanted, query_bytes):
                yield span, self._blocks(span.queries, advance)

    def scores(
        self, label: str, wanted: Tensor, weights: Sequence[Tensor], query_bytes: int
    ) -> Iterator[tuple[Span, list[Tensor]]]:
        """Final scores of the sorted `wanted` queries, span by span: (q, N) for each of the weights (M,), where
        contributions come."""
        query_bytes += 8 * self.examples * len(weights)
        if self._cache is None and self._noise is None and isinstance(self.source, GroupScores):
            yield from self._weighted_totals(label, wanted, weights, query_bytes)
            return
        finish, rows = self.source.finish, torch.stack(list(weights)).float()  # (c, M)
        for span, blocks in self.sweep(label, wanted, query_bytes):
            wanted = put(span.wanted, self.device)
            scores = [torch.empty(len(wanted), self.examples, device=self.device) for _ in weights]
            for train, block in blocks:
                linear = torch.bmm(rows.to(block).expand(len(block), -1, -1), block.mT)  # (q, c, n)
                for w, part, out in zip(weights, linear.unbind(1), scores):
                    out[:, train] = finish(part, w.to(block), span.queries, train)[wanted]
            yield span, scores

    def _weighted_totals(
        self, label: str, wanted: Tensor, weights: Sequence[Tensor], query_bytes: int
    ) -> Iterator[tuple[Span, list[Tensor]]]:
        """The same from features: a weighted score is one product, without the M numbers of each pair."""
        assert isinstance(self.source, GroupScores)
        query_bytes += 12 * self.source.queries.shape[0] * self.source.queries.shape[2]
        with console.progress(label, len(wanted), unit="queries") as advance:
            for span in self._spans(wanted, query_bytes):
                source = self.source.select(span.wanted + span.queries.start)
                scores = [torch.empty(source.shape, device=self.device) for _ in weights]
                for w, out in zip(weights, scores):
                    for rows, q, part in source.totals(w.float()):
                        out[q, rows] = part
                yield span, scores
                advance(len(span.wanted))

    def each(self, order: Tensor) -> Iterator[tuple[int, Blocks]]:
        """Queries one by one in any order, each with (n, M) blocks that can be read repeatedly."""
        everything, at_once = slice(0, self.examples), self.memory // CACHE_SHARE // self.query_bytes
        if self._cache is not None:
            yield from ((query, [(everything, self._cache[query])]) for query in order.tolist())
        elif at_once == 0:
            yield from ((query, _QueryStream(self._blocks, query)) for query in order.tolist())
        else:  # features are read once for all queries of a part
            for part in order.split(at_once):
                loaded = list(self._gather(part))
                for query in part.tolist():
                    blocks = [(everything, loaded.pop(0))]
                    yield query, blocks
                    blocks.clear()  # those of this part are freed before the next is read

    def load(self, queries: slice) -> Tensor:
        """(q, N, M) at once, whatever the budget."""
        if self._cache is not None:
            return self._cache[queries]
        return self._check_whole(self.source.contributions(queries), range(*queries.indices(self.queries)))

    def _gather(self, queries: Tensor) -> Tensor:
        """(q, N, M) of queries in any order."""
        if isinstance(self.source, GroupScores):
            loaded = self.source.select(queries).contributions(slice(0, len(queries)))
        else:
            loaded = torch.empty(len(queries), self.examples, self.groups, device=self.device)
            for row, q in zip(loaded, queries.tolist()):
                row.copy_(self.source.contributions(slice(q, q + 1))[0])
        return self._check_whole(loaded, queries.tolist())

    def _check_whole(self, loaded: Tensor, queries: Sequence[int]) -> Tensor:
        loaded = self._prepare(loaded, queries, slice(0, self.examples))
        self._finite[list(queries)] = True
        return loaded

    def _spans(self, wanted: Tensor, query_bytes: int) -> Iterator[Span]:
        # At least one training example of every query in the span must fit, whatever the caller holds.
        step = max(1, self.memory // (SPAN_SHARE * max(query_bytes, 8 * self.groups)))
        starts = torch.arange(min(step, self.queries), self.queries, step)
        cuts = torch.searchsorted(wanted.contiguous(), starts).tolist()
        for low, high in pairwise([0, *cuts, len(wanted)]):
            if low < high:
                part = wanted[low:high]
                first, last = int(part[0]), int(part[-1])
                yield Span(slice(first, last + 1), part - first, slice(low, high))

    def _blocks(
        self, queries: slice, advance: Callable[[int], None] | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        if self._cache is not None:
            yield slice(0, self.examples), self._cache[queries]
            return
        for train, block in self.source.stream(queries):
            yield train, self._prepare(block, range(queries.start, queries.stop), train)
            if advance is not None:
                advance(block.shape[0] * block.shape[1])
        self._finite[queries] = True

    def _prepare(self, block: Tensor, queries: Sequence[int], train: slice) -> Tensor:
        """Check a block and add noise to it."""
        if self._finite[list(queries)].all():
            return block if self._noise is None else self._noise.add(block, queries, train)
        # The extremes are NaN or infinite if any number is, and need no second block of memory.
        low, high = torch.stack(torch.aminmax(block)).tolist()
        self.low, self.high = min(self.low, low), max(self.high, high)
        if not math.isfinite(low + high):
            row, _, group = (~torch.isfinite(block)).nonzero()[0].tolist()
            raise UndeError(
                f"contributions of query {queries[row]} are NaN or infinite (group "
                f"{self.source.groups[group]!r}): weights can only be learned from finite ones. Leave this "
                "query out, or look at the model's loss and gradients on it"
            )
        return block if self._noise is None else self._noise.add(block, queries, train)


@dataclass(frozen=True)
class _QueryStream:
    """Blocks of one query too large to hold: each iteration reads them from the source again."""

    blocks: Callable[[slice], Blocks]
    query: int

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for train, block in self.blocks(slice(self.query, self.query + 1)):
            yield train, block[0]


def group_deviation(blocks: Iterable[Tensor]) -> Tensor:
    """σ_j, the standard deviation of each group over all query-training pairs of the (q, n, M) blocks."""
    count, mean, squares = 0, torch.zeros(()), torch.zeros(())
    for block in blocks:
        for rows in block:  # one query at a time: the double precision copy stays small
            found = torch.var_mean(put(rows, rows.device, torch.float64), dim=0, correction=0)
            variance, centre = (x.cpu() for x in found)  # (M,)
            shift, total = centre - mean, count + len(rows)
            # Pooled second moments (Chan, Golub, LeVeque): exact, and stable if the mean is large.
            squares = squares + len(rows) * variance + shift**2 * (count * len(rows) / total)
            mean = mean + shift * (len(rows) / total)
            count = total
    return (squares / max(count, 1)).sqrt()


@dataclass(frozen=True)
class Noise:
    """Noise of standard deviation s·σ_j on contributions, for the study of robustness.

    One fixed draw for each (query, training example, group), which depends on the seed and the pair only: the same in
    every epoch and for every way of cutting the data into blocks.
    """

    deviation: Tensor  # (M,) s·σ_j
    seed: int

    def add(self, block: Tensor, queries: Sequence[int], train: slice) -> Tensor:
        """`block` (q, n, M) plus its noise."""
        noisy = block.clone()
        scale = self.deviation.to(block)
        for row, query in enumerate(queries):
            noisy[row] += scale * self._draw(query, train).to(block)
        return noisy

    def _draw(self, query: int, train: slice) -> Tensor:
        """Standard normal numbers for a query and some training examples: (n, M)."""
        first, last = train.start // _NOISE_ROWS, (train.stop - 1) // _NOISE_ROWS
        shape = (_NOISE_ROWS, len(self.deviation))
        chunks = [
            np.random.default_rng([self.seed, query, chunk]).standard_normal(shape, dtype=np.float32)
            for chunk in range(first, last + 1)
        ]
        offset = train.start - first * _NOISE_ROWS
        return torch.from_numpy(np.concatenate(chunks)[offset : offset + train.stop - train.start])
