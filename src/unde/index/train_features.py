"""Training features of an index under a kernel, as scores read them; scores in other processes.

Jobs score a block of queries against a run of neighbouring shards. Their blocks are those that one process would take,
so every number is the same to the last bit; the best examples of all runs are merged, earlier ones first among equals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unde.devices import CPU, put, upload
from unde.errors import UndeError
from unde.groups import Groups
from unde.index.kernel_cache import KernelCache
from unde.index.reader import IndexReader
from unde.kernels import Kernel
from unde.methods import Method
from unde.parallel import SERIAL, Executor, Job, run_with_progress
from unde.scoring.blocks import DEVICE_SHARE, ScoreRange, TopK, cut
from unde.scoring.group_scores import GroupScores
from unde.scoring.train_features import ScoringWorkers, TrainFeatures
from unde.store.remote import StorePath
from unde.store.shards import Results, read_shard, scratch, write_shard

HELD_SHARE = 4  # blocks stay in memory if all of them take at most 1/4 of the budget
RUN_BYTES = 2**23  # of each thread that are unpacked together: with fewer, threads wait too often
MOST_RUN_BYTES = 2**24  # of all threads: more are not in the cache any more when they are multiplied
_FEWEST, _FEWEST_BYTES = (
    64,
    2**29,
)  # rows: products with fewer are slow, but as many whole gradients are too large
RUNS = 64  # of neighbouring shards, at most: one job each, for a block of queries


class StoredFeatures(TrainFeatures):
    """Training features of an index under a kernel.

    Where K is block-diagonal it acts on the query side, and blocks are the features as they are stored; else blocks
    are K g(n).
    """

    def __init__(
        self,
        reader: IndexReader,
        kernel: Kernel,
        executor: Executor = SERIAL,
        ids: Sequence[Any] | None = None,
        checkpoint_weights: Sequence[float] | None = None,
    ) -> None:
        m = reader.manifest
        self.reader, self.kernel, self.executor, self.ids = reader, kernel, executor, ids
        self.units, self.columns, self.cuts = m.unit_names, m.columns, m.shards
        self.checkpoint_weights = checkpoint_weights or m.checkpoint_weights
        self._caches = [KernelCache(reader, kernel, c, executor) for c in range(m.terms)]
        self.kernel_blocks = self._caches[0].bound.blocks
        if self.kernel_blocks is None and reader.codec.lossy:
            raise UndeError(
                f"{reader.folder} is stored as {m.store_dtype}, in which K g(n) cannot be: {kernel} has to act on the "
                "query side (its `blocks`), or build with another projection"
            )
        for cache in self._caches:
            cache.fitted() if self.kernel_blocks is not None else cache.make_rows()
        there, held = reader.compute, 4 * m.examples * m.width * m.terms
        small = held <= there.memory // HELD_SHARE
        self._blocks_in_memory: dict[int, list[Tensor]] | None = {} if small else None
        self.device = there.device
        if self.device != CPU:  # what is held there takes its memory
            kernels = m.terms * self._caches[0].bound.needs().memory if self.kernel_blocks is not None else 0
            left = there.memory - kernels - held * small
            self.block_memory = max(there.memory // HELD_SHARE, left)
        self.selected = range(len(m.shards))  # shards that are read
        self._leverage: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredFeatures, (self.reader, self.kernel, SERIAL, None, self.checkpoint_weights)

    def select_run(self, run: int) -> StoredFeatures:
        """The same features, of which only a run of neighbouring shards is read."""
        part = copy(self)
        part.selected = shard_runs(len(self.cuts))[run]
        return part

    @property
    def selected_examples(self) -> slice:
        """The training examples of the selected shards."""
        return slice(self.cuts[self.selected[0]].start, self.cuts[self.selected[-1]].stop)

    def inside(self, which: Tensor) -> Tensor:
        """(n,) bool: which of the training examples are in the selected shards."""
        rows = self.selected_examples
        return (which >= rows.start) & (which < rows.stop)

    # --- blocks ---------------------------------------------------------------------------------------------

    def block(self, s: int) -> list[Tensor]:
        if self._blocks_in_memory is not None and s in self._blocks_in_memory and not self._changed(s):
            return self._blocks_in_memory[s]
        parts = self._unpack(self._shards(s), slice(None))
        if self._blocks_in_memory is not None:
            self._blocks_in_memory[s] = parts
        return parts

    def block_rows(self, s: int, local: Tensor) -> list[Tensor]:
        if self._blocks_in_memory is not None:
            return super().block_rows(s, local)
        return self._unpack(self._shards(s), local)

    def _unpack(self, shards: Sequence[dict[str, Tensor]], local: Tensor | slice) -> list[Tensor]:
        """Some rows of shards, where they are computed with."""
        packed = [self.reader.features_of(shard, local) for shard in shards]
        there = [{name: put(t, self.device) for name, t in part.items()} for part in packed]
        return [self.reader.codec.unpack(part, self.columns) for part in there]

    def blocks(self) -> Iterator[tuple[slice, list[Tensor]]]:
        return ((self.cuts[s], self.block(s)) for s in self.selected)

    def runs(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """As `blocks`; shards that have to be unpacked come in parts that are multiplied while they are in cache.

        To write all that a shard unpacks to, and to read it again, would take longer than to read it in float32. To a
        device parts go up as they are stored, the next while the last is multiplied.
        """
        codec, here = self.reader.codec, self.device == CPU
        if self._blocks_in_memory is not None or (here and codec.mapped):
            yield from self.blocks()
            return
        width, terms = self.columns[-1].stop, len(self._caches)
        step = run_rows(width * terms) if here else self.device_rows(1 / DEVICE_SHARE)
        buffers = None if codec.mapped else torch.empty(terms, step, width, device=self.device)
        for rows, packed in upload(self._packed_runs(step), self.device):
            outs = [None] * terms if buffers is None else buffers[:, : rows.stop - rows.start]
            yield rows, [codec.unpack(part, self.columns, out) for part, out in zip(packed, outs)]

    def _packed_runs(self, step: int) -> Iterator[tuple[slice, list[dict[str, Tensor]]]]:
        """(training examples, what they are unpacked from under each checkpoint), `step` at most."""
        for s in self.selected:
            shards = self._shards(s)
            for rows in cut(self.cuts[s], step):
                local = slice(rows.start - self.cuts[s].start, rows.stop - self.cuts[s].start)
                yield rows, [self.reader.features_of(shard, local) for shard in shards]

    def device_rows(self, share: float) -> int:
        """Training examples that take this share of the budget: three parts as they are stored, and one unpacked."""
        codec = self.reader.codec
        packed, unpacked = codec.nbytes(1, self.columns), 0 if codec.mapped else 4 * self.columns[-1].stop
        budget = share * (self.block_memory or self.reader.memory)
        return max(1, int(budget / (len(self._caches) * (3 * packed + unpacked))))

    def sides(self, which: Tensor, step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(positions in `which`, features of those examples, what features of queries are multiplied with), both
        (C, n, D), at most `step` at a time."""
        for s, rows in enumerate(self.cuts):
            inside = ((which >= rows.start) & (which < rows.stop)).nonzero()[:, 0]
            if not len(inside):
                continue
            held = None if self._blocks_in_memory is None else self.block(s)
            shards = self._shards(s) if held is None else []
            apart = self.kernel_blocks is None  # what is multiplied with is K g(n)
            sources = [self.reader.packed(c, s) for c in range(len(self._caches))] if apart else []
            for at in inside.split(step):
                local = which[at] - rows.start
                if held is None:
                    facing = torch.stack(self._unpack(shards, local))
                else:
                    facing = torch.stack([block.index_select(0, put(local, self.device)) for block in held])
                yield at, torch.stack(self._unpack(sources, local)) if apart else facing, facing

    def _changed(self, s: int) -> bool:
        """Whether a file that a block in memory is mapped from has changed."""
        if not self.reader.codec.mapped:
            return False
        if self.kernel_blocks is None:
            return any(cache.watch.changed(cache.path(s)) for cache in self._caches)
        m, reader = self.reader.manifest, self.reader
        return any(reader.watch.changed(m.shard(reader.folder, c, s)) for c in range(m.terms))

    def _shards(self, s: int) -> list[dict[str, Tensor]]:
        """Shard s as it is stored, under each checkpoint."""
        if self.kernel_blocks is None:
            return [cache.packed(s) for cache in self._caches]
        return [self.reader.packed(c, s) for c in range(len(self._caches))]

    # --- kernel and norms -------------------------------------------------------------------------------------

    def apply_kernel(self, checkpoint: int, queries: Tensor) -> Tensor:
        return queries if self.kernel_blocks is None else self.kernel_times(checkpoint, queries)

    def kernel_times(self, checkpoint: int, rows: Tensor) -> Tensor:
        """K applied to features (n, D), wherever it acts."""
        return self._caches[checkpoint].fitted().apply(rows)

    def squared_norms(self) -> Tensor:
        return self.reader.squares

    def skipped(self) -> Tensor:
        return self.reader.skipped

    def extra_values(self) -> Tensor:
        return self.reader.values("beside")

    def find(self, digests: Sequence[str]) -> list[int]:
        return self.reader.find_digests(digests)

    def leverage(self) -> Tensor:
        if self._leverage is None:
            self._leverage = torch.zeros(self.examples)  # of the selected shards
            rows = self.selected_examples
            which = torch.arange(rows.start, rows.stop)
            for at, values in self.map_examples(_leverage_run, {}, None, which):
                self._leverage[which[at]] = values
        return self._leverage

    # --- other processes ----------------------------------------------------------------------------------------

    @property
    def distributed(self) -> bool:
        """Whether there are other processes, and several shards to share."""
        return not self.executor.in_process and len(self.cuts) > 1

    @cached_property
    def _workers(self) -> ParallelScoring:
        return ParallelScoring(self)

    @property
    def workers(self) -> ScoringWorkers | None:
        return self._workers if self.distributed else None

    def map_examples(
        self, function: Function, inputs: dict[str, Tensor], settings: Any, which: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(positions in `which`, one value for each), by `function` of the shards that hold them."""
        if not self.distributed:
            yield torch.arange(len(which)), function(self, inputs | {"which": which}, settings)["values"]
            return
        jobs: list[Job] = [(run,) for run in range(len(shard_runs(len(self.cuts))))]
        for (run,), result in self.map(function, inputs | {"which": which}, settings, jobs, "self-influence"):
            yield self.select_run(run).inside(which).nonzero()[:, 0], result["values"]

    def map(
        self,
        function: Function,
        inputs: dict[str, Tensor],
        settings: Any,
        jobs: Sequence[Job],
        title: str = "scores",
    ) -> Iterator[tuple[Job, dict[str, Tensor]]]:
        """Results of `function` for jobs (run of shards, …), in any order."""
        with scratch(self.reader.folder) as folder:
            call = RunJobs(self, function, settings, folder)
            write_shard(folder / INPUTS, call.results.owner, inputs)
            for job in run_with_progress(self.executor, run_job, call, jobs, title):
                yield job, dict(call.results.take(job))


Function = Callable[..., dict[str, Tensor]]  # (features of some shards, inputs, settings, *rest of the job)
INPUTS = "inputs.safetensors"


@dataclass
class RunJobs:
    """A function of runs of shards, to be run by other processes; inputs and results travel in files."""

    features: StoredFeatures
    function: Function
    settings: Any
    folder: StorePath
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.results = Results(self.features.reader.manifest.id, self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        return read_shard(self.folder / INPUTS, self.results.owner)


def run_job(call: RunJobs, run: int, *rest: int) -> None:
    """Compute the results of one job."""
    result = call.function(call.features.select_run(run), call.inputs, call.settings, *rest)
    call.results.put((run, *rest), result)


def shard_runs(shards: int) -> list[range]:
    """Runs of neighbouring shards.

    >>> shard_runs(3)
    [range(0, 1), range(1, 2), range(2, 3)]
    """
    count = min(RUNS, shards)
    return [range(shards * i // count, shards * (i + 1) // count) for i in range(count)]


def run_rows(width: int) -> int:
    """Rows that are unpacked together: by the number of threads alone, so that scores do not depend on the memory.

    >>> run_rows(10**6), run_rows(124 * 10**6)
    (64, 1)
    """
    fewest = max(1, min(_FEWEST, _FEWEST_BYTES // (4 * width)))
    return max(fewest, min(RUN_BYTES * torch.get_num_threads(), MOST_RUN_BYTES) // (4 * width) // 16 * 16)


@dataclass(frozen=True)
class ScoreSettings:
    """What jobs that compute scores share."""

    method: Method
    partition: Groups
    memory: int
    k: int = 0
    largest: bool = True

    def scores(self, features: StoredFeatures, inputs: dict[str, Tensor]) -> GroupScores:
        if "leverage" in inputs:
            features._leverage = inputs["leverage"]
        queries = inputs["queries"]
        digests = [""] * queries.shape[1]
        return GroupScores(features, queries, self.method, self.partition, digests, {}, self.memory)


@dataclass(frozen=True)
class ParallelScoring:
    """Scores computed by other processes."""

    features: StoredFeatures

    def total(self, scores: GroupScores, w: Tensor) -> Tensor:
        out = torch.empty(scores.shape)
        for q, rows, result in self._run(scores, w, self._map(scores, w)):
            out[q, rows] = result["scores"]
        return out

    def rank(self, scores: GroupScores, w: Tensor, k: int, largest: bool) -> TopK:
        best = TopK(len(scores), k, largest)
        in_order = sorted(self._map(scores, w, k, largest))  # by jobs, which differ
        for q, rows, result in self._run(scores, w, in_order):
            best.merge(q, rows.stop - rows.start, result["values"], result["indices"])
        return best

    def _map(
        self, scores: GroupScores, w: Tensor, k: int = 0, largest: bool = True
    ) -> Iterable[tuple[Job, dict[str, Tensor]]]:
        inputs = {"queries": scores.queries, "weights": w}
        if scores.method.extra_measures:
            inputs["leverage"] = self.features.leverage()
        settings = ScoreSettings(scores.method, scores.partition, scores.memory, k, largest)
        runs = range(len(shard_runs(len(self.features.cuts))))
        jobs: list[Job] = [(run, block) for block in range(len(scores.query_blocks)) for run in runs]
        return self.features.map(_score_run, inputs, settings, jobs)

    def _run(
        self, scores: GroupScores, w: Tensor, results: Iterable[tuple[Job, dict[str, Tensor]]]
    ) -> Iterator[tuple[slice, slice, dict[str, Tensor]]]:
        """(queries, training examples, result) of each job; then check that no score underflows."""
        sizes = ScoreRange(len(scores))
        for (run, block), result in results:
            q = scores.query_blocks[block]
            yield q, self.features.select_run(run).selected_examples, result
            sizes.update(q, result["sizes"].unsqueeze(1))
        if not scores.method.groupwise:
            scores.check_underflow(sizes, w)


def _score_run(
    features: StoredFeatures, inputs: dict[str, Tensor], settings: ScoreSettings, block: int
) -> dict[str, Tensor]:
    """The scores of a block of queries against a run of shards, or the best k of them."""
    scores, rows = settings.scores(features, inputs), features.selected_examples
    q, count = scores.query_blocks[block], rows.stop - rows.start
    sizes = ScoreRange(len(scores), features.device)
    if settings.k:
        best = scores.rank_blocks(inputs["weights"], settings.k, settings.largest, block, sizes)
        k = min(settings.k, count)
        return {"values": best.values[q, :k], "indices": best.indices[q, :k], "sizes": sizes.largest[q]}
    out = torch.empty(q.stop - q.start, count)
    for some, _, part in scores.totals(inputs["weights"], block, sizes):
        out[:, some.start - rows.start : some.stop - rows.start] = part
    return {"scores": out, "sizes": sizes.largest[q]}


def _leverage_run(features: StoredFeatures, inputs: dict[str, Tensor], settings: None) -> dict[str, Tensor]:  # noqa: ARG001
    """⟨g(n), K g(n)⟩ of the selected shards."""
    etas, rows = features.reader.manifest.checkpoint_weights, features.selected_examples
    step = features.examples if features.device == CPU else features.device_rows(1 / DEVICE_SHARE)
    parts = []
    for _, sides, facing in features.sides(torch.arange(rows.start, rows.stop), step):
        pairs = enumerate(zip(etas, sides, facing))
        of_checkpoints = [
            eta * torch.linalg.vecdot(features.apply_kernel(c, f), t) for c, (eta, f, t) in pairs
        ]
        parts.append(torch.stack(of_checkpoints).sum(0))
    return {"values": torch.cat(parts).cpu()}
