"""Fitted kernels, cached on disk: moments in rounds of jobs; K g(n) where K mixes all columns.

kernels/<key>/moments.safetensors      undamped: another damping costs no pass over the features
kernels/<key>/<round>-<job>.safetensors    partial results, gone once they are merged
kernels/<key>/000000.safetensors       K g(n) of a shard, under one damping
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from unde import console
from unde.index.reader import FeatureSource, IndexReader
from unde.kernels import Fitted, Kernel
from unde.kernels.base import (
    Moments,
    Round,
    add_partials,
    code_key,
    describe_kernel,
    put_moments,
    read,
)
from unde.parallel import SERIAL, Executor, Job, run_with_progress
from unde.store import layout
from unde.store.files import checksum, clear_partial
from unde.store.locks import locked
from unde.store.remote import StorePath
from unde.store.shards import (
    FileWatch,
    ShardError,
    copy_tensors,
    is_valid_shard,
    read_shard,
    reread_shard,
    write_shard,
)

VERSION = 2  # raise when kernels come out differently: files of another version are not read
MOMENTS = "moments.safetensors"


class KernelCache:
    """Moments and K g(n) of one kernel under one checkpoint, on disk; computed if missing or damaged."""

    def __init__(
        self, stored: IndexReader, kernel: Kernel, checkpoint: int, executor: Executor = SERIAL
    ) -> None:
        self.stored, self.kernel, self.checkpoint, self.executor = stored, kernel, checkpoint, executor
        self.source = stored.source(kernel.fisher, checkpoint)
        self._features = FeatureSource(stored, checkpoint)  # what K is applied to
        self.bound = kernel.bind(self.source.sizes)
        self._fitted: Fitted | None = None
        self.watch = FileWatch()
        fisher = self.source.stored.manifest.id
        self._moments = _KernelFolder(
            stored.folder, f"{VERSION} {fisher} {self.bound.key}{code_key(kernel)} {self.source.checkpoint}"
        )
        self._rows = _KernelFolder(
            stored.folder, f"{VERSION} {stored.manifest.id} {describe_kernel(kernel)} {checkpoint}"
        )

    def fitted(self) -> Fitted:
        """K, fitted once and kept."""
        if self._fitted is None:
            there = self.stored.compute
            self.bound.check(there.memory, there.device)
            self._fitted = self.bound.fit(put_moments(self._load_moments(), self.source), self.source)
        return self._fitted

    def path(self, s: int) -> StorePath:
        """The file of K g(n) of shard s."""
        return self._rows.shard(s)

    def packed(self, s: int) -> dict[str, Tensor]:
        """K g(n) of shard s, as it is stored."""
        try:
            shard = reread_shard(self.path(s), self._rows.owner, self.watch)
            self.stored.check(self.path(s), shard, s)
        except ShardError as e:
            error = ShardError(f"{e}. Open the index again, which makes K g(n) anew")
            raise self.stored.changed() or error from None
        return shard

    def make_rows(self) -> None:
        """Compute all K g(n), unless they are on disk."""
        count = len(self.stored.manifest.shards)
        if not all(self._is_valid(s) for s in range(count)):
            self._rows.write_locked(lambda: self._write_rows(count))
            self._fitted = None  # as large as all that is stored, and not needed any more
        self.watch.record(self._rows.shard(s) for s in range(count))

    def _is_valid(self, s: int) -> bool:
        """Whether K g(n) of shard s is on disk, and can be unpacked."""
        try:
            self.stored.check(self.path(s), read_shard(self.path(s), self._rows.owner), s)
        except ShardError:
            return False
        return True

    def _write_rows(self, count: int) -> None:
        todo = {s for s in range(count) if not self._is_valid(s)}
        if not todo:
            return  # another process computed it
        joined = self._features.sizes.joined()
        jobs: list[Job] = [(i,) for i, blocks in enumerate(joined) if todo & set(blocks)]
        if self.executor.in_process:
            self.fitted()  # before the progress bar
        else:
            self._load_moments()  # others make K from them
        self._run(KernelCache.write_rows, jobs, "K g(n)")

    def write_rows(self, i: int) -> None:
        """K g(n) of the i-th of the joined blocks."""
        m, blocks = self.stored.manifest, self._features.sizes.joined()[i]
        fitted, rows = self.fitted(), self._features.sizes.rows(blocks)
        product = (
            fitted.train(blocks)
            if self._features == self.source
            else fitted.apply(read(self._features, blocks))
        )
        for s in blocks:
            here = slice(m.shards[s].start - rows.start, m.shards[s].stop - rows.start)
            packed = self.stored.codec.pack(product[here].cpu(), m.columns)
            write_shard(self._rows.shard(s), self._rows.owner, packed)

    def _load_moments(self) -> Moments:
        if not self.bound.rounds:
            return {}
        at = self._moments
        with contextlib.suppress(ShardError):
            return copy_tensors(read_shard(at.path / MOMENTS, at.owner))
        try:
            at.write_locked(self._write_moments)
        except ShardError:  # in an object store, another may have cleared the partial results
            if not is_valid_shard(at.path / MOMENTS, at.owner):
                raise
        return copy_tensors(read_shard(at.path / MOMENTS, at.owner, verify=False))

    def _write_moments(self) -> None:
        at, moments = self._moments, {}
        if is_valid_shard(at.path / MOMENTS, at.owner):
            return  # another process computed it
        for n, r in enumerate(self.bound.rounds):
            total = add_partials(self._partial_results(n, r, moments))
            moments |= r.finish(put_moments(total, self.source))
            if any(later.jobs > 1 for later in self.bound.rounds[n + 1 : n + 2]):
                write_shard(at.before(n + 1), at.owner, moments)
        write_shard(at.path / MOMENTS, at.owner, moments)
        for n, r in enumerate(self.bound.rounds):
            for i in range(r.jobs):
                at.partial(r, i).unlink(missing_ok=True)
            at.before(n).unlink(missing_ok=True)

    def _partial_results(self, n: int, r: Round, before: Moments) -> list[Callable[[], Moments]]:
        """Results of the jobs of round n, computed unless on disk; a single one stays in memory."""
        at = self._moments
        if r.jobs == 1:
            with console.progress("kernel", 1, unit="parts") as advance:
                result = r.job(self.source, 0, put_moments(before, self.source))
                advance(1)
            return [lambda: result]
        todo: list[Job] = [(n, i) for i in range(r.jobs) if not is_valid_shard(at.partial(r, i), at.owner)]
        self._run(KernelCache.write_partial, todo, "kernel")
        return [partial(read_shard, at.partial(r, i), at.owner, verify=False) for i in range(r.jobs)]

    def write_partial(self, n: int, i: int) -> None:
        """The result of job i of round n."""
        at, r = self._moments, self.bound.rounds[n]
        before = put_moments(read_shard(at.before(n), at.owner) if n else {}, self.source)
        write_shard(at.partial(r, i), at.owner, r.job(self.source, i, before))

    def _run(self, function: Callable[..., None], jobs: Sequence[Job], title: str) -> None:
        for _ in run_with_progress(self.executor, function, self, jobs, title):
            pass

    def __getstate__(self) -> dict[str, Any]:
        sent = {"stored": self.stored, "kernel": self.kernel, "checkpoint": self.checkpoint}
        return sent | {"places": (self._moments.path, self._rows.path)}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        places = sent.pop("places")
        self.__init__(**sent)
        self._moments.path, self._rows.path = places  # where they are, should that be elsewhere


class _KernelFolder:
    """A folder of one kernel in an index, or a temporary one where that cannot be written."""

    def __init__(self, index: StorePath, content: str) -> None:
        self.owner = checksum(content)
        self.path: StorePath = index / layout.KERNELS / self.owner
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def shard(self, s: int) -> StorePath:
        return self.path / f"{s:06d}.safetensors"

    def partial(self, r: Round, job: int) -> StorePath:
        return self.path / f"{r.name}-{job:06d}.safetensors"

    def before(self, n: int) -> StorePath:
        """Moments of the rounds before round n."""
        return self.path / f"before-{n}.safetensors"

    def write_locked(self, write: Callable[[], None]) -> None:
        """Run `write` under the lock of the folder; clear what killed processes left."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._locked(write)
        except OSError as e:
            self._temporary = tempfile.TemporaryDirectory(prefix="unde-kernel-")
            console.note(
                f"cannot write in {self.path} ({e.strerror}): this kernel is kept in "
                f"{self._temporary.name} until the program ends"
            )
            self.path = Path(self._temporary.name)
            self._locked(write)

    def _locked(self, write: Callable[[], None]) -> None:
        with locked(self.path, wait=True):
            clear_partial(self.path)
            write()
            clear_partial(self.path)  # what workers left that were killed
