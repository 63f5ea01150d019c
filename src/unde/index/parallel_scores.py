"""Scores in several processes: each scores a block of queries against some of the training examples.

Blocks are those that one process would take, so every number is the same to the last bit; of the best examples the
best are chosen, and of equal ones the earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from unde.groups import Groups
from unde.index.reader import Stored
from unde.methods import Method
from unde.parallel import Executor, Job, run_with_progress
from unde.scoring.group_scores import GroupScores
from unde.scoring.range_checks import Sizes
from unde.scoring.top import Best
from unde.store.job_results import Results, scratch
from unde.store.remote import StorePath
from unde.store.shards import read_shard, write_shard

RUNS = 64  # of neighbouring shards, at most: one job each, for a block of queries


class Scoring(Protocol):
    """Makes scores in another process, without anybody to share the work with."""

    @property
    def stored(self) -> Stored: ...

    def scores(self, method: Method, features: Tensor, digests: list[str]) -> GroupScores: ...


@dataclass
class Part:
    """What jobs of one kind share. Queries, weights and what else is large are in the file `given`."""

    scorer: Scoring
    method: Method
    folder: StorePath
    groups: Groups | None = None
    memory: int = 0
    k: int = 0
    largest: bool = True

    def __post_init__(self) -> None:
        self.results = Results(self.stored.manifest.id, self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in (*self.__dataclass_fields__, "results")}

    @property
    def stored(self) -> Stored:
        return self.scorer.stored

    def give(self, **tensors: Tensor) -> None:
        write_shard(self.folder / "given.safetensors", self.stored.manifest.id, tensors)

    @cached_property
    def given(self) -> dict[str, Tensor]:
        return read_shard(self.folder / "given.safetensors", self.stored.manifest.id)

    @cached_property
    def scores(self) -> GroupScores:
        """As they were asked for."""
        features = self.given["features"]
        made = self.scorer.scores(self.method, features, [""] * features.shape[1])
        train = made.train
        if "leverage" in self.given:
            train = replace(train, leverage=lambda: self.given["leverage"])
        assert self.groups is not None
        return replace(made, train=train, partition=self.groups, memory=self.memory)

    def of(self, run: int) -> GroupScores:
        """The same, against one run of shards."""
        some = runs(len(self.stored.manifest.shards))[run]
        return replace(self.scores, train=replace(self.scores.train, some=some))

    def inside(self, run: int, where: Tensor) -> Tensor:
        """(n,) bool: which of the training examples `where` are in a run of shards."""
        start, count = rows_of(self, run)
        return (where >= start) & (where < start + count)


def runs(shards: int) -> list[range]:
    """
    >>> runs(3)
    [range(0, 1), range(1, 2), range(2, 3)]
    """
    count = min(RUNS, shards)
    return [range(shards * i // count, shards * (i + 1) // count) for i in range(count)]


def score_top(part: Part, block: int, run: int) -> None:
    scores = part.of(run)
    q, seen = scores.query_blocks[block], Sizes(len(scores))
    best = scores.best(part.given["weights"], part.k, part.largest, block, seen)
    count = min(part.k, rows_of(part, run)[1])
    found = {"values": best.values[q, :count], "indices": best.indices[q, :count], "sizes": seen.largest[q]}
    part.results.put((block, run), found)


def score_total(part: Part, block: int, run: int) -> None:
    scores = part.of(run)
    start, count = rows_of(part, run)
    q, seen = scores.query_blocks[block], Sizes(len(scores))
    out = torch.empty(q.stop - q.start, count)
    for rows, _, found in scores.totals(part.given["weights"], block, seen):
        out[:, rows.start - start : rows.stop - start] = found
    part.results.put((block, run), {"scores": out, "sizes": seen.largest[q]})


@dataclass(frozen=True)
class Spread:
    """Scores of an index, computed by an executor."""

    scorer: Scoring
    executor: Executor
    leverage: Callable[[], Tensor]

    @property
    def stored(self) -> Stored:
        return self.scorer.stored

    def total(self, scores: GroupScores, w: Tensor) -> Tensor:
        out, sizes = torch.empty(scores.shape), Sizes(len(scores))
        with self._part(scores, w) as part:
            for block, run in self._done(score_total, part, scores):
                start, count = rows_of(part, run)
                found, q = part.results.take((block, run)), scores.query_blocks[block]
                out[q, start : start + count] = found["scores"]
                sizes.see(q, found["sizes"].unsqueeze(1))
        self._refuse_lost(scores, sizes, w)
        return out

    def top(self, scores: GroupScores, w: Tensor, k: int, largest: bool) -> Best:
        best, sizes = Best(len(scores), k, largest), Sizes(len(scores))
        with self._part(scores, w, k, largest) as part:
            for _ in self._done(score_top, part, scores):
                pass
            for block, q in enumerate(scores.query_blocks):
                for run in range(len(runs(len(self.stored.manifest.shards)))):
                    found = part.results.take((block, run))
                    best.merge(q, *rows_of(part, run), found["values"], found["indices"])
                    sizes.see(q, found["sizes"].unsqueeze(1))
        self._refuse_lost(scores, sizes, w)
        return best

    def _refuse_lost(self, scores: GroupScores, sizes: Sizes, w: Tensor) -> None:
        if not scores.method.groupwise:
            scores.refuse_lost(sizes, w)

    @contextmanager
    def _part(self, scores: GroupScores, w: Tensor, k: int = 0, largest: bool = True) -> Generator[Part]:
        with scratch(self.stored.folder) as folder:
            beside = {"leverage": self.leverage()} if scores.method.extra_measures else {}
            part = Part(self.scorer, scores.method, folder, scores.partition, scores.memory, k, largest)
            part.give(features=scores.queries, weights=w, **beside)
            yield part

    def _done(self, function: Callable[..., None], part: Part, scores: GroupScores) -> Iterator[Job]:
        count = len(runs(len(self.stored.manifest.shards)))
        jobs: list[Job] = [(b, r) for b in range(len(scores.query_blocks)) for r in range(count)]
        return run_with_progress(self.executor, function, part, jobs, "scores")


def rows_of(part: Part, run: int) -> tuple[int, int]:
    """The first training example of a run of shards, and how many there are."""
    shards, some = part.stored.manifest.shards, runs(len(part.stored.manifest.shards))[run]
    start = shards[some[0]].start
    return start, shards[some[-1]].stop - start
