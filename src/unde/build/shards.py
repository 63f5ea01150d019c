"""Building an index: the plan, then shard after shard; a second call goes on where the first stopped."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unde import console, methods
from unde.data import Rows, to_device
from unde.errors import UndeError
from unde.features import Collector, Coverage, Unit, placement, plan_coverage
from unde.features.factors import Factors, gathered
from unde.index import manifest as mf
from unde.index.checkpoints import Checkpoint, loaded
from unde.index.checks import changed_example, length_now, shard_path, to_signed
from unde.index.folder import LOG, locked, prepare_folder
from unde.index.store import DTYPES, ShardError, pack, read_shard, write_bytes, write_shard
from unde.tasks.base import Task
from unde.tasks.cutting import recut

SHARD_BYTES = 2**24  # in float32: what allocators hand out again and again without asking the system
SHARD_BATCHES = 64  # at most this much work is lost to a kill

Batches = Iterator[tuple[range, Any, list[str]]]
Todo = list[tuple[int, slice]]  # shard number, its rows


def shard_size(batch_size: int, width: int) -> int:
    """Examples in a shard: a whole number of batches, so that a resumed build runs the very same batches."""
    batches = SHARD_BYTES // max(1, 4 * batch_size * width)
    return batch_size * min(max(1, batches), SHARD_BATCHES)


class Builder:
    """Computes the missing shards of one index."""

    def __init__(
        self,
        folder: Path,
        manifest: mf.Manifest,
        model: nn.Module,
        task: Task,
        rows: Rows,
        units: Sequence[Unit],
        *,
        checkpoints: Sequence[Checkpoint] | None,
        ids: Sequence[Any] | None,
        num_workers: int,
        memory: int,
        progress: bool,
    ) -> None:
        self.folder, self.manifest, self.model, self.task, self.rows = folder, manifest, model, task, rows
        self.units, self.checkpoints, self.ids = units, checkpoints, ids
        self.num_workers, self.memory, self.progress = num_workers, memory, progress
        self.method = methods.parse(manifest.method)
        self.measure = self.method.measure

    def run(self) -> None:
        prepare_folder(self.folder)
        with locked(self.folder):
            self._claim()
            todo = self._missing()
            count = sum(r.stop - r.start for part in todo.values() for _, r in part)
            if not count:
                return
            started = time.perf_counter()
            with ExitStack() as stack:
                advance = None
                for c, part in todo.items():
                    checkpoint = None if self.checkpoints is None else self.checkpoints[c]
                    steps, cutting = self.method.steps, self.task.cutting
                    task = self.task if steps == 1 else recut(self.task, cutting.step(c, steps))
                    with loaded(self.model, checkpoint):
                        coverage = plan_coverage(self.model, self.task, self.rows, self.units, self.measure)
                        if advance is None:
                            if self.progress:
                                kernel = self.method.kernel is not None
                                console.show_plan(self.folder, self.manifest, coverage, count, kernel)
                            bar = console.progress("features", count, self.progress, estimate="examples")
                            advance = stack.enter_context(bar)
                        with self._collector(coverage, task) as collect:
                            collect.fit(self.memory, self.rows.batch([0]))
                            self._fill(collect, c, part, advance)
            self._log(count, time.perf_counter() - started)
            self._check_data_stayed()

    def _collector(self, coverage: Coverage, task: Task) -> Collector:
        factors = None
        if self.manifest.factors:
            sizes = gathered(self.manifest.units, str(self.method.projection))
            factors = Factors(sizes, *placement(self.model))
        also = self.method.also
        return Collector(self.model, task, self.units, coverage, self.measure, factors, also=also)

    def _claim(self) -> None:
        """Write the manifest, or check that the one there is the same."""
        begun = (self.folder / mf.FILE).exists()
        if begun:
            differ = mf.differences(mf.Manifest.read(self.folder), self.manifest)
            if differ:
                raise UndeError(
                    f"{self.folder} already holds another index. What differs: {'; '.join(differ)}. "
                    "Choose another folder, or delete this one"
                )
        (self.folder / "shards").mkdir(exist_ok=True)
        if self.ids is not None:
            write_bytes(self.folder / "ids.json", (json.dumps(list(self.ids)) + "\n").encode())
        if not begun:
            write_bytes(self.folder / mf.FILE, self.manifest.to_json().encode())

    def _missing(self) -> dict[int, Todo]:
        """What is still to compute, by checkpoint; damaged shards are named and count as missing."""
        todo: dict[int, Todo] = {}
        where, digests = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for c in range(self.manifest.terms):
            for s, r in enumerate(self.manifest.shards):
                path = shard_path(self.folder, c, s)
                try:
                    if path.exists():
                        digests.append(read_shard(path, self.manifest.id)["digest"].clone())
                        where.append(torch.arange(r.start, r.stop))
                        continue
                except ShardError as e:
                    console.note(f"{e}: computing it again")
                todo.setdefault(c, []).append((s, r))
        changed = changed_example(self.rows, torch.cat(where), torch.cat(digests))
        if changed is not None:
            raise UndeError(
                f"example {changed} reads differently than when {self.folder} was begun: the data changed. "
                "Restore the data, or build in another folder"
            )
        return todo

    def _fill(self, collect: Collector, c: int, todo: Todo, advance: console.Advance) -> None:
        step = self.manifest.batch_size
        cuts = [[range(a, min(a + step, r.stop)) for a in range(r.start, r.stop, step)] for _, r in todo]
        stream = self.rows.batches([cut for shard in cuts for cut in shard], self.num_workers)
        with ThreadPoolExecutor(1) as writer:  # hashing and the disk work while the next shard is computed
            written: list[Future[None]] = []
            for (s, _), shard in zip(todo, cuts):
                parts: list[dict[str, Tensor]] = []
                for _ in shard:
                    where, batch, digests = self._next(stream)
                    parts.append(self._batch(collect, where, batch, digests))
                    advance(len(where))
                whole = _joined(parts)
                if c:
                    self._check_same(s, whole["digest"])
                if written:
                    written.pop().result()
                path = shard_path(self.folder, c, s)
                written.append(writer.submit(self._write, path, whole))
            for last in written:
                last.result()

    def _write(self, path: Path, whole: dict[str, Tensor]) -> None:
        columns, features = self.manifest.columns, whole.pop("features")
        whole["squares"] = torch.stack([features[:, x].square().sum(1) for x in columns], 1)
        whole |= pack(features, columns, DTYPES[self.manifest.store_dtype])
        write_shard(path, self.manifest.id, whole)

    def _next(self, stream: Batches) -> tuple[range, Any, list[str]]:
        try:
            return next(stream)
        except IndexError:
            if length_now(self.rows) == self.manifest.examples:
                raise
            raise self._other_length() from None

    def _batch(self, collect: Collector, where: range, batch: Any, digests: list[str]) -> dict[str, Tensor]:
        features, values = collect(to_device(batch, collect.device), list(where))
        features, values = features.float().cpu(), values.float().cpu()
        finite = features.isfinite().all(1) & values.isfinite()
        if not finite.all():
            bad = [where[int(i)] for i in (~finite).nonzero()[:, 0]]
            if self.manifest.on_bad == "error":
                named = bad if self.ids is None else [self.ids[i] for i in bad]
                raise UndeError(
                    f"the gradient of example {named[0]!r} is NaN or infinite"
                    + (f" (and of {len(bad) - 1} more in its batch)" if len(bad) > 1 else "")
                    + ": look at the example and the model, or build with on_bad='skip' to leave it out"
                )
            features[~finite] = 0.0
        beside = {"also": collect.also.float().cpu()} if self.method.also else {}
        if collect.factors is not None:
            beside["factors"] = collect.factors.take().cpu()
            if not finite.all():  # the covariances of the others alone
                good = [where[int(i)] for i in finite.nonzero()[:, 0]]
                beside["factors"].zero_()
                if good:
                    collect(to_device(self.rows.batch(good), collect.device), good)
                    beside["factors"] = collect.factors.take().cpu()
        return beside | {
            "features": features,
            "loss": values,
            "skipped": (~finite).to(torch.uint8),
            "digest": torch.tensor([to_signed(d) for d in digests], dtype=torch.int64),
        }

    def _check_same(self, s: int, digest: Tensor) -> None:
        """Later checkpoints read the data again: it must be what the first one read."""
        first = read_shard(shard_path(self.folder, 0, s), self.manifest.id, verify=False)["digest"]
        changed = (first != digest).nonzero()[:, 0]
        if len(changed):
            raise mf.reads_differently(self.manifest.shards[s].start + int(changed[0]))

    def _check_data_stayed(self) -> None:
        """What could be seen to change while it was read: the length, and a sample of the content."""
        if length_now(self.rows) != self.manifest.examples:
            raise self._other_length()
        where = torch.tensor(mf.sampled(self.manifest.examples))
        digests = torch.empty_like(where)
        for s, r in enumerate(self.manifest.shards):
            here = (where >= r.start) & (where < r.stop)
            if here.any():
                shard = read_shard(shard_path(self.folder, 0, s), self.manifest.id, verify=False)
                digests[here] = shard["digest"][where[here] - r.start]
        changed = changed_example(self.rows, where, digests)
        if changed is not None:
            raise mf.reads_differently(changed)

    def _other_length(self) -> UndeError:
        return UndeError(
            f"the length of the data changed while it was read: {self.manifest.examples} examples at first, "
            f"now {length_now(self.rows)}. Build from data that stays as it is"
        )

    def _log(self, examples: int, seconds: float) -> None:
        """How long it took, apart from what the index is: this file is no part of its identity."""
        entry = {
            "examples": examples,
            "seconds": round(seconds, 3),
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        with contextlib.suppress(OSError), open(self.folder / LOG, "a") as f:
            f.write(json.dumps(entry) + "\n")


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The batches of a shard as one: rows one after the other, covariances added up."""
    if len(parts) == 1:
        return parts[0]
    summed = {k: functools.reduce(torch.add, [p[k] for p in parts]) for k in ("factors",) if k in parts[0]}
    return {k: torch.cat([p[k] for p in parts]) for k in parts[0] if k not in summed} | summed
