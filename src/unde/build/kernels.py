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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from unde import console, methods
from unde.build.shards import content
from unde.build.stored import FeatureSource, Stored
from unde.kernels import Fitted, Kernel, Sizes
from unde.kernels.base import Moments, Round, Settled, Work, reduced
from unde.store import layout
from unde.store.codec import codec
from unde.store.files import clear_partial
from unde.store.locks import locked
from unde.store.manifest import Manifest
from unde.store.remote import Place
from unde.store.shards import WRITTEN, ShardError, file_bytes, read_shard, sound, write_shard

VERSION = 2  # raise when kernels come out differently: files of another version are not read
KEPT = 4  # blocks stay in memory if all of them take at most this fraction of the budget, 1 in 4
MOMENTS = "moments.safetensors"


class Training:
    """The training side under a kernel, block by block, and K for what it is multiplied with.

    Where K is block-diagonal it acts on the query side, and blocks are the features as they are stored; else blocks
    are K g(n).
    """

    def __init__(self, stored: Stored, kernel: Kernel) -> None:
        m = stored.manifest
        self.cuts = m.shards
        self._kernels = [KernelFiles(stored, kernel, c) for c in range(m.terms)]
        self.mixes = self._kernels[0].settled.blocks
        if self.mixes is None:
            for k in self._kernels:
                k.make_rows()
        else:
            for k in self._kernels:
                k.fitted()
        self._keep = kept(m, stored.memory)
        self._kept: dict[int, list[Tensor]] = {}
        self._stored = stored

    def block(self, s: int) -> list[Tensor]:
        """The rows `cuts[s]`, (n, D) for each checkpoint."""
        if s in self._kept:
            return self._kept[s]
        parts = self._stored.blocks(s) if self.mixes is not None else [k.rows(s) for k in self._kernels]
        if self._keep:
            self._kept[s] = parts
        return parts

    def on_queries(self, checkpoint: int, rows: Tensor) -> Tensor:
        """What is multiplied with blocks, of query features (n, D)."""
        return rows if self.mixes is None else self._kernels[checkpoint].fitted().apply(rows)

    def transformed(self, checkpoint: int, rows: Tensor) -> Tensor:
        """K applied to features (n, D)."""
        return self._kernels[checkpoint].fitted().apply(rows)


class KernelFiles:
    """One kernel under one checkpoint: its moments, and K g(n), on disk; made if not there or not whole."""

    def __init__(self, stored: Stored, kernel: Kernel, checkpoint: int) -> None:
        self.stored, self.checkpoint = stored, checkpoint
        self.source = stored.source(kernel.fisher, checkpoint)
        self.settled = kernel.on(self.source.sizes)
        self._fitted: Fitted | None = None
        of = self.source.stored.manifest.id
        self._moments = _Folder(stored.folder, f"{VERSION} {of} {self.settled.key} {self.source.checkpoint}")
        self._rows = _Folder(stored.folder, f"{VERSION} {stored.manifest.id} {kernel} {checkpoint}")

    def fitted(self) -> Fitted:
        """K, inverted once and held on to."""
        if self._fitted is None:
            self.settled.check(self.stored.memory)
            self._fitted = self.settled.fit(self._moments_at_hand(), self.source)
        return self._fitted

    def rows(self, s: int) -> Tensor:
        """K g(n) of shard s."""
        shard = read_shard(self._rows.shard(s), self._rows.owner, verify=False)
        return self.stored.codec.unpack(shard, self.stored.manifest.columns)

    def make_rows(self) -> None:
        """All K g(n), unless they are there."""
        count = len(self.stored.manifest.shards)
        if all(sound(self._rows.shard(s), self._rows.owner) for s in range(count)):
            return
        self._rows.written(lambda: self._write_rows(count))
        self._fitted = None  # as large as all that is stored, and not needed any more

    def _write_rows(self, count: int) -> None:
        m = self.stored.manifest
        todo = [s for s in range(count) if not sound(self._rows.shard(s), self._rows.owner)]
        if not todo:
            return  # another process was at it
        fitted, own = self.fitted(), FeatureSource(self.stored, self.checkpoint) == self.source
        with console.progress("K g(n)", m.examples) as advance:
            for blocks in self.source.sizes.joined():
                rows = self.source.sizes.rows(blocks)
                if set(blocks) & set(todo):
                    made = fitted.train(blocks) if own else fitted.apply(self._own_rows(blocks))
                    for s in blocks:
                        here = slice(m.shards[s].start - rows.start, m.shards[s].stop - rows.start)
                        packed = self.stored.codec.pack(made[here], m.columns)
                        write_shard(self._rows.shard(s), self._rows.owner, packed)
                advance(rows.stop - rows.start)

    def _own_rows(self, blocks: list[int]) -> Tensor:
        return torch.cat([self.stored.block(self.checkpoint, s) for s in blocks])

    def _moments_at_hand(self) -> Moments:
        if not self.settled.rounds:
            return {}
        at = self._moments
        with contextlib.suppress(ShardError):
            return read_shard(at.path / MOMENTS, at.owner)
        try:
            at.written(self._write_moments)
        except (
            ShardError
        ):  # in a store of objects, another may have cleared the partial results it is done with
            if not sound(at.path / MOMENTS, at.owner):
                raise
        return read_shard(at.path / MOMENTS, at.owner, verify=False)

    def _write_moments(self) -> None:
        at, moments = self._moments, {}
        if sound(at.path / MOMENTS, at.owner):
            return  # another process was at it
        total = sum(r.jobs for r in self.settled.rounds)
        with console.progress("kernel", total) as advance:
            for r in self.settled.rounds:
                parts = _partial_results(self.settled, r, self.source, moments, at, advance)
                moments |= r.finish(reduced(parts))
        write_shard(at.path / MOMENTS, at.owner, moments)
        for r in self.settled.rounds:
            for i in range(r.jobs):
                at.partial(r, i).unlink(missing_ok=True)


@dataclass(frozen=True)
class Costs:
    """What a training side takes under a kernel."""

    memory: dict[str, int]  # bytes at the peak of fitting it and writing K g(n), by what takes them
    held: int  # bytes of K, of all checkpoints, where it acts on the query side
    flops: int
    disk: dict[str, int]
    scratch: int  # bytes of files that are gone in the end


def sizes_of(m: Manifest, precision: torch.dtype) -> Sizes:
    """The features of an index as kernels see them, with what reading them takes."""
    averaged = methods.parse(m.method).steps > 1  # all steps, twice over
    steps = (2 * m.terms - 1) * block_bytes(m) if averaged else 0
    sizes = FeatureSource(Stored(Path(), m, 0), 0).sizes
    return replace(sizes, beside=max(reading(m, precision), steps))


def costs(m: Manifest, settled: Settled, sizes: Sizes) -> Costs:
    """Of the index `m` under a kernel that was settled on `sizes`, its own or those of another measurement."""
    needs, averaged = settled.needs(), methods.parse(m.method).steps > 1
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
        rows = replace(needs.apply, peak=max(needs.apply.peak, own)) if averaged else needs.train
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
    )


def _rows_bytes(m: Manifest, sizes: Sizes, rows: Work) -> int:
    """Bytes beside K while K g(n) is made and written, of rows that are read together, those before still there."""
    made, packed = 4 * sizes.most * sizes.width, _packed(m)
    before = made + max(new for new, _, _ in packed) if len(sizes.joined()) > 1 else 0
    written = max(new + WRITTEN * file for new, file, _ in packed)
    return max(before + rows.peak, made + written)


def _packed(m: Manifest) -> list[tuple[int, int, int]]:
    """Of the shards of each length: bytes of new tensors that packing makes, of a file, and how many they are."""
    found = []
    for rows, count in Counter(r.stop - r.start for r in m.shards).items():
        features = torch.empty(rows, m.width, device="meta")
        packed = codec(m.store_dtype).pack(features, m.columns)
        new = sum(t.nbytes for t in packed.values() if t is not features)
        found.append((new, file_bytes(packed, f"{0:06d}.safetensors"), count))
    return found


def block_bytes(m: Manifest) -> int:
    """Of the features of a shard under one checkpoint."""
    return 4 * min(m.examples, m.settled.shard_size) * m.width


def reading(m: Manifest, precision: torch.dtype) -> int:
    """Bytes beside the features of a shard while it is read: what else is mapped from its file."""
    stored = content(m, min(m.examples, m.settled.shard_size), precision)
    mapped = stored["features"].nbytes == block_bytes(m)  # handed on as they are
    return _bytes(stored) - (block_bytes(m) if mapped else 0)


def in_memory(m: Manifest, memory: int) -> int:
    """Bytes of the blocks that scores are made with: all if they are kept, else one beside the one before."""
    whole = 4 * m.examples * m.width * m.terms
    return whole if kept(m, memory) else min(whole, 2 * m.terms * block_bytes(m))


def kept(m: Manifest, memory: int) -> bool:
    """Whether blocks stay in memory once they were read."""
    return 4 * m.examples * m.width * m.terms <= memory // KEPT


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


def _partial_results(
    settled: Settled,
    r: Round,
    source: FeatureSource,
    before: Moments,
    at: _Folder,
    advance: Callable[[int], None],
) -> list[Callable[[], Moments]]:
    """The results of the jobs of a round, computed where they are not on disk; a single one stays in memory."""
    if r.jobs == 1:
        made = r.job(source, 0, before)
        advance(1)
        return [lambda: made]
    for i in range(r.jobs):
        if not sound(at.partial(r, i), at.owner):
            write_shard(at.partial(r, i), at.owner, r.job(source, i, before))
        advance(1)
    return [partial(read_shard, at.partial(r, i), at.owner, verify=False) for i in range(r.jobs)]


class _Folder:
    """A place in the folder of an index, or a temporary one where that cannot be written."""

    def __init__(self, index: Place, content: str) -> None:
        self.owner = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        self.path: Place = index / layout.KERNELS / self.owner
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def shard(self, s: int) -> Place:
        return self.path / f"{s:06d}.safetensors"

    def partial(self, r: Round, job: int) -> Place:
        return self.path / f"{r.name}-{job:06d}.safetensors"

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
