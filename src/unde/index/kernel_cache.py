"""Kernels fitted to what is stored: moments in rounds of jobs, kept on disk; K g(n) where K mixes all columns.

kernels/<key>/moments.safetensors      undamped: another damping costs no pass over the features
kernels/<key>/<round>-<job>.safetensors    partial results, gone once they are merged
kernels/<key>/000000.safetensors       K g(n) of a shard, under one damping
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unde import console, methods
from unde.index.reader import FeatureSource, Stored
from unde.index.shard_writer import content
from unde.kernels import Fitted, Kernel, Sizes
from unde.kernels.base import Moments, Round, Settled, Work, read, reduced
from unde.kernels.fingerprint import code_of, described
from unde.parallel import SERIAL, Executor, Job, shown
from unde.store import layout
from unde.store.file_watch import FileWatch, copy_tensors
from unde.store.files import clear_partial
from unde.store.locks import locked
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import WRITTEN, ShardError, file_bytes, read_again, read_shard, sound, write_shard

VERSION = 2  # raise when kernels come out differently: files of another version are not read
MOMENTS = "moments.safetensors"


class KernelCache:
    """One kernel under one checkpoint: its moments, and K g(n), on disk; made if not there or not whole."""

    def __init__(self, stored: Stored, kernel: Kernel, checkpoint: int, executor: Executor = SERIAL) -> None:
        self.stored, self.kernel, self.checkpoint, self.executor = stored, kernel, checkpoint, executor
        self.source = stored.source(kernel.fisher, checkpoint)
        self._own = FeatureSource(stored, checkpoint)  # what K is applied to
        self.settled = kernel.on(self.source.sizes)
        self._fitted: Fitted | None = None
        self.watch = FileWatch()
        of = self.source.stored.manifest.id
        self._moments = _Folder(
            stored.folder, f"{VERSION} {of} {self.settled.key}{code_of(kernel)} {self.source.checkpoint}"
        )
        self._rows = _Folder(
            stored.folder, f"{VERSION} {stored.manifest.id} {described(kernel)} {checkpoint}"
        )

    def fitted(self) -> Fitted:
        """K, inverted once and held on to."""
        if self._fitted is None:
            self.settled.check(self.stored.memory)
            self._fitted = self.settled.fit(self._moments_at_hand(), self.source)
        return self._fitted

    def path(self, s: int) -> StorePath:
        """Of K g(n) of shard s."""
        return self._rows.shard(s)

    def packed(self, s: int) -> dict[str, Tensor]:
        """K g(n) of shard s, as it is stored."""
        try:
            shard = read_again(self.path(s), self._rows.owner, self.watch)
            self.stored.check(self.path(s), shard, s)
        except ShardError as e:
            again = ShardError(f"{e}. Open the index again, which makes K g(n) anew")
            raise self.stored.changed() or again from None
        return shard

    def make_rows(self) -> None:
        """All K g(n), unless they are there."""
        count = len(self.stored.manifest.shards)
        if not all(self._sound(s) for s in range(count)):
            self._rows.written(lambda: self._write_rows(count))
            self._fitted = None  # as large as all that is stored, and not needed any more
        self.watch.record(self._rows.shard(s) for s in range(count))

    def _sound(self, s: int) -> bool:
        """Whether K g(n) of shard s is there, and can be unpacked."""
        try:
            self.stored.check(self.path(s), read_shard(self.path(s), self._rows.owner), s)
        except ShardError:
            return False
        return True

    def _write_rows(self, count: int) -> None:
        todo = {s for s in range(count) if not self._sound(s)}
        if not todo:
            return  # another process was at it
        joined = self._own.sizes.joined()
        jobs: list[Job] = [(i,) for i, blocks in enumerate(joined) if todo & set(blocks)]
        if self.executor.here:
            self.fitted()  # before the bar of what is made with it
        else:
            self._moments_at_hand()  # others make K from them
        self._run(apply_kernel, jobs, "K g(n)")

    def write_rows(self, i: int) -> None:
        """K g(n) of the i-th of the joined blocks."""
        m, blocks = self.stored.manifest, self._own.sizes.joined()[i]
        fitted, rows = self.fitted(), self._own.sizes.rows(blocks)
        made = fitted.train(blocks) if self._own == self.source else fitted.apply(read(self._own, blocks))
        for s in blocks:
            here = slice(m.shards[s].start - rows.start, m.shards[s].stop - rows.start)
            packed = self.stored.codec.pack(made[here], m.columns)
            write_shard(self._rows.shard(s), self._rows.owner, packed)

    def _moments_at_hand(self) -> Moments:
        if not self.settled.rounds:
            return {}
        at = self._moments
        with contextlib.suppress(ShardError):
            return copy_tensors(read_shard(at.path / MOMENTS, at.owner))
        try:
            at.written(self._write_moments)
        except (
            ShardError
        ):  # in a store of objects, another may have cleared the partial results it is done with
            if not sound(at.path / MOMENTS, at.owner):
                raise
        return copy_tensors(read_shard(at.path / MOMENTS, at.owner, verify=False))

    def _write_moments(self) -> None:
        at, moments = self._moments, {}
        if sound(at.path / MOMENTS, at.owner):
            return  # another process was at it
        for n, r in enumerate(self.settled.rounds):
            moments |= r.finish(reduced(self._partial_results(n, r, moments)))
            if any(later.jobs > 1 for later in self.settled.rounds[n + 1 : n + 2]):
                write_shard(at.before(n + 1), at.owner, moments)
        write_shard(at.path / MOMENTS, at.owner, moments)
        for n, r in enumerate(self.settled.rounds):
            for i in range(r.jobs):
                at.partial(r, i).unlink(missing_ok=True)
            at.before(n).unlink(missing_ok=True)

    def _partial_results(self, n: int, r: Round, before: Moments) -> list[Callable[[], Moments]]:
        """The results of the jobs of round n, computed where they are not on disk; a single one stays in memory."""
        at = self._moments
        if r.jobs == 1:
            with console.progress("kernel", 1, unit="parts") as advance:
                made = r.job(self.source, 0, before)
                advance(1)
            return [lambda: made]
        todo: list[Job] = [(n, i) for i in range(r.jobs) if not sound(at.partial(r, i), at.owner)]
        self._run(gather_moments, todo, "kernel")
        return [partial(read_shard, at.partial(r, i), at.owner, verify=False) for i in range(r.jobs)]

    def write_partial(self, n: int, i: int) -> None:
        """The result of job i of round n."""
        at, r = self._moments, self.settled.rounds[n]
        before = read_shard(at.before(n), at.owner) if n else {}
        write_shard(at.partial(r, i), at.owner, r.job(self.source, i, before))

    def _run(self, function: Callable[..., None], jobs: Sequence[Job], title: str) -> None:
        for _ in shown(self.executor, function, self, jobs, title):
            pass

    def __getstate__(self) -> dict[str, Any]:
        sent = {"stored": self.stored, "kernel": self.kernel, "checkpoint": self.checkpoint}
        return sent | {"places": (self._moments.path, self._rows.path)}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        places = sent.pop("places")
        self.__init__(**sent)
        self._moments.path, self._rows.path = places  # where they are, should that be elsewhere


def gather_moments(files: KernelCache, n: int, i: int) -> None:
    files.write_partial(n, i)


def apply_kernel(files: KernelCache, i: int) -> None:
    files.write_rows(i)


@dataclass(frozen=True)
class Costs:
    """What a training side takes under a kernel."""

    memory: dict[str, int]  # bytes at the peak of fitting it and writing K g(n), by what takes them
    held: int  # bytes of K, of all checkpoints, where it acts on the query side
    flops: int  # of all of it
    disk: dict[str, int]
    scratch: int  # bytes of files that are gone in the end
    fits: int  # times that moments are gathered: for each checkpoint, or for the mean of all steps
    rows: Work  # of making K g(n), of all checkpoints, where it is kept


def sizes_of(m: Manifest, precision: torch.dtype) -> Sizes:
    """The features of an index as kernels see them, with what reading them takes."""
    averaged = methods.parse(m.method).steps > 1  # all steps, twice over
    steps = (2 * m.terms - 1) * block_bytes(m) if averaged else 0
    sizes = FeatureSource(Stored(Path(), m, 0), 0).sizes
    return replace(sizes, beside=max(reading(m, precision), steps))


def costs(m: Manifest, settled: Settled, sizes: Sizes) -> Costs:
    """Of the index `m` under a kernel that was settled on `sizes`, its own or those of another measurement."""
    needs, method = settled.needs(), methods.parse(m.method)
    averaged = method.steps > 1
    fits, mixing = 1 if averaged else m.terms, settled.blocks is None
    steps = [
        {"moments, and features they are made of": needs.gather.peak},
        {"moments being written": (1 + WRITTEN) * _bytes(needs.moments)},
        {"matrices": needs.fit.peak},
    ]
    disk = {"moments of the kernel": fits * file_bytes(needs.moments, MOMENTS)} if needs.moments else {}
    rows = Work()
    if mixing:
        own = 8 * sizes.most * sizes.width  # blocks, and the rows they make up
        foreign = averaged or method.probe is not None  # K g(n) is not of the features that K was fitted to
        rows = replace(needs.apply, peak=max(needs.apply.peak, own)) if foreign else needs.train
        rows = replace(rows, flops=rows.flops // sizes.labels, rows=rows.rows // sizes.labels)
        steps.append({"matrices": needs.held, "features and K g(n)": _rows_bytes(m, sizes, rows)})
        disk["K g(n)"] = m.terms * sum(count * file for _, file, count in _packed(m))
    highest = max(steps, key=lambda step: sum(step.values()))
    others = {} if mixing or m.terms == 1 else {"K of other checkpoints": (m.terms - 1) * needs.held}
    return Costs(
        memory=highest | others,
        held=0 if mixing else m.terms * needs.held,
        flops=fits * needs.gather.flops + m.terms * (needs.fit.flops + rows.flops),
        disk=disk,
        scratch=fits * needs.partial,
        fits=fits,
        rows=replace(rows, flops=m.terms * rows.flops, rows=m.terms * rows.rows),
    )


def _rows_bytes(m: Manifest, sizes: Sizes, rows: Work) -> int:
    """Bytes beside K while K g(n) is made and written, of rows that are read together."""
    made, packed = 4 * sizes.most * sizes.width, _packed(m)
    written = max(new + WRITTEN * file for new, file, _ in packed)
    return max(rows.peak, made + written)


def _packed(m: Manifest) -> list[tuple[int, int, int]]:
    """Of the shards of each length: bytes of new tensors that packing makes, of a file, and how many they are."""
    found = []
    for rows, count in Counter(r.stop - r.start for r in m.shards).items():
        stored = m.codec
        kinds = stored.layout(rows, m.columns)
        packed = {name: torch.empty(shape, dtype=t, device="meta") for name, (shape, t) in kinds.items()}
        new = 0 if stored.mapped else stored.nbytes(rows, m.columns)
        found.append((new, file_bytes(packed, f"{0:06d}.safetensors"), count))
    return found


def block_bytes(m: Manifest) -> int:
    """Of the features of a shard under one checkpoint."""
    return 4 * min(m.examples, m.settled.shard_size) * m.width


def reading(m: Manifest, precision: torch.dtype) -> int:
    """Bytes beside the features of a shard while it is read: what else is mapped from its file."""
    stored = content(m, min(m.examples, m.settled.shard_size), precision)
    return _bytes(stored) - (block_bytes(m) if handed_on(m) else 0)


def handed_on(m: Manifest) -> bool:
    """Whether blocks are features as they are mapped."""
    return m.codec.mapped


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


class _Folder:
    """A place in the folder of an index, or a temporary one where that cannot be written."""

    def __init__(self, index: StorePath, content: str) -> None:
        self.owner = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        self.path: StorePath = index / layout.KERNELS / self.owner
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def shard(self, s: int) -> StorePath:
        return self.path / f"{s:06d}.safetensors"

    def partial(self, r: Round, job: int) -> StorePath:
        return self.path / f"{r.name}-{job:06d}.safetensors"

    def before(self, n: int) -> StorePath:
        """Moments of the rounds before round n."""
        return self.path / f"before-{n}.safetensors"

    def written(self, write: Callable[[], None]) -> None:
        """`write` under the lock of the folder; what kills have left is cleared."""
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
