"""Contributions read within a memory budget: kept if they fit, streamed anew if not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from unde import console
from unde.errors import UndeError
from unde.weights.from_features import FromFeatures
from unde.weights.noise import Noise, spread
from unde.weights.protocol import ResolvedScores

KEPT = 2  # contributions stay in memory if they take at most this fraction of the budget, 1 in 2
SPANS = 4  # what is held for the queries of a span takes at most this fraction
_NEAR = 2**26  # bytes of kept contributions in a span
_NEAREST = 2**23  # bytes of them that are read twice in a row, the second time from a cache
_BATCH = 8  # products of a batch have a core each; one product of few rows has one core
_COLUMNS = 2  # weights at least: a tall matrix times a single vector has one core, too
_SOME, _LEAST = 64, 1e-34  # examples that tell the unit, and the least there is
Blocks = Iterable[tuple[slice, Tensor]]


@dataclass(frozen=True)
class Span:
    """A run of neighbouring queries, and which of them are wanted."""

    queries: slice  # of the source
    wanted: Tensor  # (q,) rows within the run
    places: slice  # where these are in the sorted list of all wanted queries

    @property
    def which(self) -> Tensor:
        """(q,) the wanted queries of the source."""
        return self.wanted + self.queries.start


def keeps(queries: int, examples: int, groups: int, memory: int) -> bool:
    """Whether contributions stay in memory once they were read."""
    return queries * (4 * examples * groups + 8 * groups**2) <= memory // KEPT


def together(query_bytes: int, groups: int, memory: int) -> int:
    """Queries in a span, of each of which `query_bytes` are held."""
    return max(1, memory // (SPANS * max(query_bytes, 8 * groups)))


class Contributions:
    """The (Q, N, M) contributions of a source, checked, with noise added if asked for.

    They are kept in memory if they fit in half the source's budget together with the M×M matrices that the
    fixed-point solver needs for each query; otherwise every pass streams them from the source.
    """

    def __init__(self, source: ResolvedScores, noise: float = 0.0, seed: int = 0) -> None:
        self.source = source
        self.queries, self.examples = source.shape
        self.groups = len(source.groups)
        self.memory = getattr(source, "spare", source.memory)
        self.linear = source.method.linear
        self.query_bytes = 4 * self.examples * self.groups
        self._noise: Noise | None = None
        self._kept: Tensor | None = None
        self._finite = torch.zeros(self.queries, dtype=torch.bool)  # queries all of whose blocks were checked
        self.unit = 1.0  # of what is kept, about: in it, products of contributions and scores do not vanish
        if noise > 0:
            passes = self.sweep("measuring the contributions", torch.arange(self.queries), 0)
            self._noise = Noise(noise * spread(block for _, blocks in passes for _, block in blocks), seed)
        if keeps(self.queries, self.examples, self.groups, self.memory):
            self._kept = self.load(slice(0, self.queries))
            some = self._kept[:, :: max(1, self.examples // _SOME)]
            self.unit = max(_LEAST, float(some.abs().max())) if some.any() else 1.0
        self._features = FromFeatures.of(source) if self._kept is None and self._noise is None else None

    @property
    def kept(self) -> bool:
        """Whether contributions are in memory."""
        return self._kept is not None

    @property
    def picks_queries(self) -> bool:
        """Whether some of the queries cost no more than their share."""
        return self._kept is not None or self._features is not None

    def sweep(self, label: str, wanted: Tensor, query_bytes: int) -> Iterator[tuple[Span, Blocks]]:
        """One pass over the sorted `wanted` queries: spans of them, each with its (q, n, M) blocks.

        `query_bytes` is what the caller holds for each query of a span; it bounds the spans' lengths.
        """
        with console.progress(label, self.queries * self.examples, unit="scores") as advance:
            for span in self._spans(wanted, query_bytes):
                yield span, self._blocks(span.queries, advance)

    def spans(self, label: str, wanted: Tensor, query_bytes: int) -> Iterator[Span]:
        """One pass over the sorted `wanted` queries for who reads a span by `scores` and `pulled`."""
        if self._kept is not None:
            query_bytes = max(query_bytes, self.memory * self.query_bytes // (SPANS * _NEAR))
        elif self._features is not None:
            query_bytes += self._features.query_bytes
        with console.progress(label, len(wanted), unit="queries") as advance:
            for span in self._spans(wanted, query_bytes, self.picks_queries):
                yield span
                advance(len(span.wanted))

    def scores(self, span: Span, weights: Sequence[Tensor]) -> list[Tensor]:
        """Final scores of the wanted queries of a span, (q, N) for each of the weights (M,)."""
        if self._features is not None:
            return [self._features.scores(span.which, w) for w in weights]
        if self._kept is not None and self.linear:
            return self.turned(span, weights, 0)[0]
        finish, found = self.source.finish, [torch.empty(len(span.wanted), self.examples) for _ in weights]
        for train, c in self._blocks(span.queries):
            for w, out in zip(weights, found):
                w = w.to(c)
                out[:, train] = finish(c @ w, w, span.queries, train).cpu()[span.wanted]
        return found

    def turned(self, span: Span, weights: Sequence[Tensor], count: int) -> tuple[list[Tensor], list[Tensor]]:
        """Scores of kept contributions, and Σ_n s_n C_q[n], (q, M), of the first `count` of the weights.

        What a block was multiplied with for its scores, it is multiplied with again while it is near.
        """
        asked = torch.zeros(max(_COLUMNS, len(weights)), self.groups)
        asked[: len(weights)] = torch.stack(list(weights))
        scores = torch.empty(len(weights), len(span.wanted), self.examples)
        sums = torch.zeros(len(span.wanted), count, self.groups)
        for places, rows, block in self._near(span):
            made = (block.flatten(0, 1) @ asked.to(block).T).view(*block.shape[:2], -1)  # (q, n, c)
            scores[:, places, rows] = made[:, :, : len(weights)].movedim(2, 0).cpu()
            if count:
                sums[places] += _turned(made[:, :, :count], block).cpu()
        return list(scores), list(sums.unbind(1))

    def _near(self, span: Span) -> Iterator[tuple[slice, slice, Tensor]]:
        """Kept contributions (q, n, M) that fit in a cache, of many queries or of some rows of one; where they are."""
        many, rows = _NEAREST // self.query_bytes, max(_BATCH, _NEAREST // (4 * self.groups))
        queries = many if many >= _BATCH else 1
        for run, places in self._runs(span):
            for q in range(0, len(run), queries):
                block = run[q : q + queries]
                which = slice(places.start + q, places.start + q + len(block))
                for n in range(0, self.examples, rows):
                    part = block[:, n : n + rows]
                    yield which, slice(n, n + part.shape[1]), part

    def added(self, queries: Tensor, picks: Tensor) -> Tensor:
        """Sums of kept contributions of the picked examples (q, r): (q, M)."""
        return torch.nn.functional.embedding_bag(self._places(queries, picks), self._flat, mode="sum")

    def rows(self, queries: Tensor, picks: Tensor) -> Tensor:
        """Kept contributions of the picked examples (q, r): (q, r, M)."""
        found = self._flat.index_select(0, self._places(queries, picks).view(-1))
        return found.view(*picks.shape, self.groups)

    @property
    def _flat(self) -> Tensor:
        assert self._kept is not None
        return self._kept.view(-1, self.groups)

    def _places(self, queries: Tensor, picks: Tensor) -> Tensor:
        return picks + self.examples * queries[:, None]

    def pulled(self, span: Span, pull: Tensor, picks: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_n pull[q, n] C_q[n], (q, M), of pulls (q, N), and the contributions of the picked examples, (q, r, M),
        of what is not kept."""
        if self._features is not None:
            return self._features.pulled(span.which, pull, picks)
        sums, rows = torch.zeros(len(span.wanted), self.groups), torch.empty(*picks.shape, self.groups)
        for train, block in self._blocks(span.queries):
            c = block.cpu()  # (·, n, M): may be a view of all that there is, so nothing of it is copied
            for row, query in enumerate(span.wanted.tolist()):
                sums[row] += pull[row, train] @ c[query]
            row, place = ((picks >= train.start) & (picks < train.stop)).nonzero(as_tuple=True)
            rows[row, place] = c[span.wanted[row], picks[row, place] - train.start]
        return sums, rows

    def each(self, wanted: Tensor) -> Iterator[tuple[int, Blocks]]:
        """The wanted queries one by one, each with (n, M) blocks that can be read repeatedly."""
        for span in self._spans(wanted, 2 * self.query_bytes):  # those of the span before are still there
            start = span.queries.start
            if 2 * self.query_bytes <= self.memory // SPANS:
                held = self.load(span.queries)  # (q, N, M)
                for row in span.wanted.tolist():
                    yield start + row, [(slice(0, self.examples), held[row])]
                del held
            else:
                yield start, _Restream(self._blocks, start)

    def load(self, queries: slice) -> Tensor:
        """(q, N, M) at once; the caller has seen to it that this fits."""
        if self._kept is not None:
            return self._kept[queries]
        return self._prepared(self.source.contributions(queries), queries, slice(0, self.examples))

    def _spans(self, wanted: Tensor, query_bytes: int, apart: bool = False) -> Iterator[Span]:
        """Of neighbouring queries; of as many as are wanted, if those between cost nothing (`apart`)."""
        # At least one training example of every query in the span must fit, whatever the caller holds.
        step, wanted = together(query_bytes, self.groups, self.memory), wanted.contiguous()
        cuts = range(step, len(wanted), step)
        if not apart:
            cuts = torch.searchsorted(
                wanted, torch.arange(min(step, self.queries), self.queries, step)
            ).tolist()
        for low, high in pairwise([0, *cuts, len(wanted)]):
            if low < high:
                part = wanted[low:high]
                first, last = int(part[0]), int(part[-1])
                yield Span(slice(first, last + 1), part - first, slice(low, high))

    def _runs(self, span: Span) -> Iterator[tuple[Tensor, slice]]:
        """Kept contributions of wanted queries that follow one another, with their places in the span."""
        assert self._kept is not None
        ends = (span.wanted.diff() != 1).nonzero()[:, 0].add(1).tolist()
        for start, stop in pairwise([0, *ends, len(span.wanted)]):
            first = span.queries.start + int(span.wanted[start])
            yield self._kept[first : first + stop - start], slice(start, stop)

    def _blocks(
        self, queries: slice, advance: Callable[[int], None] | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        if self._kept is not None:
            yield slice(0, self.examples), self._kept[queries]
            return
        for train, block in self.source.stream(queries):
            yield train, self._prepared(block, queries, train)
            if advance is not None:
                advance(block.shape[0] * block.shape[1])
        self._finite[queries] = True

    def _prepared(self, block: Tensor, queries: slice, train: slice) -> Tensor:
        # The extremes are NaN or infinite if any number is, and need no second block of memory.
        if not (self._finite[queries].all() or torch.stack(torch.aminmax(block)).isfinite().all()):
            row, _, group = (~torch.isfinite(block)).nonzero()[0].tolist()
            raise UndeError(
                f"contributions of query {queries.start + row} are NaN or infinite (group "
                f"{self.source.groups[group]!r}): weights can only be learned from finite ones. Leave this "
                "query out, or look at the model's loss and gradients on it"
            )
        return block if self._noise is None else self._noise.added(block, queries, train)


def _turned(scores: Tensor, block: Tensor) -> Tensor:
    """Σ_n s_n C[n] of each query, (q, n, c), (q, n, M) → (q, c, M); one query's in parts, which make a batch."""
    if len(block) > 1:
        return torch.bmm(scores.transpose(1, 2), block)
    scores, block, each = scores[0], block[0], block.shape[1] // _BATCH
    s, c = (t[: _BATCH * each].unflatten(0, (_BATCH, each)) for t in (scores, block))
    rest = slice(_BATCH * each, None)
    return (torch.bmm(s.transpose(1, 2), c).sum(0) + scores[rest].T @ block[rest])[None]


@dataclass(frozen=True)
class _Restream:
    """Blocks of one query too large to hold: each iteration reads them from the source again."""

    blocks: Callable[[slice], Blocks]
    query: int

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for train, block in self.blocks(slice(self.query, self.query + 1)):
            yield train, block[0]
