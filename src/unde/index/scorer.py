"""The scorer of an index: scores against what is stored, and self-influence τ(i, i) of training examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.groups import Groups
from unde.index.parallel_scores import Part, Spread, runs
from unde.index.reader import Stored
from unde.index.training import Training
from unde.kernels import Kernel
from unde.methods import CUSTOM, Method
from unde.methods.custom import check_picklable
from unde.parallel import SERIAL, Executor, Job, run_with_progress
from unde.scoring.group_scores import GroupScores, WeightsLike
from unde.scoring.range_checks import TINY, below, finite
from unde.scoring.train_side import TrainSide
from unde.store.job_results import scratch

_CHUNK = 2**23  # bytes: small enough to stay in cache from one operation to the next
_DIAGONAL = 128  # pairs whose final scores are taken from one square block
_HELD = 2  # kernels that are held on to


@dataclass
class Scorer:
    """Scores against the training examples of an index, under any method that fits what is stored."""

    stored: Stored
    groups: Groups
    ids: Sequence[Any] | None
    executor: Executor = SERIAL  # who computes

    def __post_init__(self) -> None:
        self._training: dict[Kernel, Training] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Scorer, (self.stored, self.groups, None)  # what it takes to score elsewhere

    def training(self, method: Method) -> Training:
        """The training side under the kernel of a method; the two used last are held on to."""
        kernel = method.kernel
        if not self.executor.in_process and CUSTOM in method.describe():
            check_picklable(method)
        made = self._training.pop(kernel, None) or Training(self.stored, kernel, self.executor)
        self._training = dict([*self._training.items(), (kernel, made)][-_HELD:])
        return made

    def scores(
        self,
        method: Method,
        features: Tensor,
        digests: list[str],
        last_checkpoint: bool = False,
    ) -> GroupScores:
        """Of queries whose features (C, Q, D) are at hand; with `last_checkpoint` the others count nothing."""
        m, training = self.stored.manifest, self.training(method)
        etas = m.checkpoint_weights
        if last_checkpoint:
            etas = [0.0] * (m.terms - 1) + etas[-1:]
        train = TrainSide(
            examples=m.examples,
            units=m.unit_names,
            columns=m.columns,
            checkpoint_weights=etas,
            cuts=training.cuts,
            block=training.block,
            packed=training.packed,
            rows=training.rows,
            squares=lambda: self.stored.squares,
            leverage=lambda: self.leverage(method),
            beside=lambda: self.stored.values("beside"),
            skipped=lambda: self.stored.skipped,
            ids=self.ids,
            on_queries=training.on_queries,
            mixes=training.mixes,
            holding=self.stored.holding,
        )
        provenance = {"index": m.id, "method": method.describe(), "model": m.models}
        provenance |= {"data": m.data, "task": m.task["name"]}
        memory = self.stored.memory
        spread = Spread(self, self.executor, train.leverage) if self._shared else None
        return GroupScores(train, features, method, self.groups, digests, provenance, memory, spread)

    @property
    def _shared(self) -> bool:
        """Whether there is somebody to share the work with, and enough of it."""
        return not self.executor.in_process and len(self.stored.manifest.shards) > 1

    def leverage(self, method: Method) -> Tensor:
        """(N,) ⟨g(n), K g(n)⟩, summed over checkpoints with η."""
        count = self.stored.manifest.examples
        if self._shared:
            self.training(method)
            return self._by_run(leverage_of, method, torch.arange(count), {})
        return self.leverages(method, range(len(self.stored.manifest.shards)))

    def leverages(self, method: Method, shards: Sequence[int]) -> Tensor:
        """Of the examples of neighbouring shards."""
        training, etas = self.training(method), self.stored.manifest.checkpoint_weights
        start = training.cuts[shards[0]].start
        out = torch.empty(training.cuts[shards[-1]].stop - start)
        for s in shards:
            rows = slice(training.cuts[s].start - start, training.cuts[s].stop - start)
            pairs = zip(etas, self.stored.blocks(s), training.block(s))
            parts = [
                eta * torch.linalg.vecdot(training.on_queries(c, f), t) for c, (eta, f, t) in enumerate(pairs)
            ]
            out[rows] = torch.stack(parts).sum(0)
        return out

    def self_influence(
        self, method: Method, weights: WeightsLike, normalize_top: int | None, where: Tensor
    ) -> Tensor:
        """(n,) for the examples `where`."""
        count = self.stored.manifest.examples
        counts = where.dim() == 1 and len(where) > 0 and where.dtype in (torch.int64, torch.int32)
        if not counts or int(where.min()) < 0 or int(where.max()) >= count:
            raise UndeError(f"subset must list examples by position, from 0 to {count - 1} and at least one")
        if self._shared:
            w = self.scores(
                method, torch.zeros(self.stored.manifest.terms, 1, self.stored.manifest.width), [""]
            )
            own = self._by_run(influence_of, method, where, {"where": where, "weights": w.weights(weights)})
        else:
            own = self.own(method, weights, where)
        finite(own, "scores of examples with themselves")
        if float(own.abs().max()) < TINY and self.own(method, weights, where, exact=True).any():
            raise below("scores of examples with themselves")
        if normalize_top is None:
            return own
        total = self._top_sums(method, weights, where, normalize_top)
        tiny = torch.finfo(torch.float32).tiny
        return torch.where(total > tiny, own / total.clamp(min=tiny), 0.0)

    def _by_run(
        self, function: Callable[..., None], method: Method, where: Tensor, given: dict[str, Tensor]
    ) -> Tensor:
        """A value of each of the training examples `where`, computed run by run of shards."""
        out = torch.empty(len(where))
        with scratch(self.stored.folder) as folder:
            part = Part(self, method, folder)
            part.give(**given)
            jobs: list[Job] = [(r,) for r in range(len(runs(len(self.stored.manifest.shards))))]
            for (run,) in run_with_progress(self.executor, function, part, jobs, "self-influence"):
                out[part.inside(run, where)] = part.results.take((run,))["values"]
        return out

    def own(self, method: Method, weights: WeightsLike, where: Tensor, exact: bool = False) -> Tensor:
        """τ(i, i), shard by shard: one pass over the features and one over the training side.

        `exact` gives them before `final`, in float64, which does not underflow.
        """
        training, m = self.training(method), self.stored.manifest
        out = torch.empty(len(where), dtype=torch.float64 if exact else torch.float32)
        step = max(1, _CHUNK // (4 * m.width * m.terms))
        step = step if method.linear else min(step, _DIAGONAL)
        for s, rows in enumerate(training.cuts):
            here = ((where >= rows.start) & (where < rows.stop)).nonzero()[:, 0]
            if not len(here):
                continue
            features, blocks = self.stored.blocks(s), training.block(s)
            for part in here.split(step):
                local = where[part] - rows.start
                q = torch.stack([f.index_select(0, local) for f in features])
                n = torch.stack([b.index_select(0, local) for b in blocks])
                scores = self.scores(method, q, [""] * len(part))
                w = scores.weights(weights)
                if exact:
                    out[part] = torch.linalg.vecdot(scores.asked.multiplied(w).double(), n.double()).sum(0)
                else:
                    out[part] = self._of_pairs(method, scores, w, where[part], n)
        return out

    def _of_pairs(self, method: Method, scores: GroupScores, w: Tensor, where: Tensor, n: Tensor) -> Tensor:
        if method.groupwise:
            return scores.own(n, where) @ w
        linear = torch.linalg.vecdot(scores.asked.multiplied(w), n).sum(0)
        if method.linear:
            return linear
        # `final` is entry by entry: the diagonal of a square block is what is asked
        return scores.finish(linear.diag(), w, slice(0, len(where)), where).diagonal()

    def _top_sums(self, method: Method, weights: WeightsLike, where: Tensor, m: int) -> Tensor:
        """The sum of the m largest scores of each example, as many examples at a time as the budget holds."""
        width = self.stored.manifest.width * self.stored.manifest.terms
        out = []
        for part in where.split(max(1, self.stored.memory // (4 * 4 * width))):
            scores = self.scores(method, self.stored.rows(part), [""] * len(part))
            out.append(scores.top(m, weights).values.sum(1))
        return torch.cat(out)


def leverage_of(part: Part, run: int) -> None:
    assert isinstance(part.scorer, Scorer)
    shards = runs(len(part.stored.manifest.shards))[run]
    part.results.put((run,), {"values": part.scorer.leverages(part.method, shards)})


def influence_of(part: Part, run: int) -> None:
    """τ(i, i) of those examples that are in a run of shards."""
    assert isinstance(part.scorer, Scorer)
    where = part.given["where"]
    here = where[part.inside(run, where)]
    values = part.scorer.own(part.method, part.given["weights"], here) if len(here) else torch.empty(0)
    part.results.put((run,), {"values": values})
