"""The training side with its kernel applied, K g(n): computed once, kept beside the shards."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unde import console
from unde.index.folder import locked
from unde.index.store import DTYPES, ShardError, pack, read_shard, unpack, write_shard
from unde.kernels import Block, EKFACKernel, Kernel, Part
from unde.methods import Method

if TYPE_CHECKING:
    from unde.index.index import Index

VERSION = 1  # raise when kernels come out differently: caches of another version are not read
KEPT = 4  # blocks stay in memory if all of them take at most this fraction of the budget, 1 in 4


class Training:
    """K g(n) of all training examples under every checkpoint, block by block."""

    def __init__(self, index: Index, kernel: Kernel | None) -> None:
        m = index.manifest
        self.cuts = m.shards
        self._readers = [_reader(index, kernel, c) for c in range(m.terms)]
        self._keep = 4 * m.examples * m.width * m.terms <= index.memory // KEPT
        self._kept: dict[int, list[Tensor]] = {}

    def block(self, s: int) -> list[Tensor]:
        """The rows `cuts[s]`, (n, D) for each checkpoint."""
        if s in self._kept:
            return self._kept[s]
        parts = [read(s) for read in self._readers]
        if self._keep:
            self._kept[s] = parts
        return parts


def transformed(index: Index, method: Method, features: Tensor) -> Tensor:
    """K applied to other features (C, n, D), such as those of queries."""
    kernel = method.kernel
    if kernel is None:
        return features
    out = []
    for c, rows in enumerate(features):
        source = _source(index, kernel)
        parts, fit = _parts(source, kernel, c), _blocks(source, c)
        [(_, made)] = kernel.apply([(slice(0, len(rows)), lambda rows=rows: rows)], parts, index.memory, fit)
        out.append(made)
    return torch.stack(out)


def _source(index: Index, kernel: Kernel) -> Index:
    """The index whose features the kernel is made of."""
    return index.fisher if getattr(kernel, "fisher", None) == "sampled" else index


def _reader(index: Index, kernel: Kernel | None, checkpoint: int) -> Callable[[int], Tensor]:
    if kernel is None:
        return lambda s: index.block(checkpoint, s)
    cache = _Cache(index, kernel, checkpoint)
    return cache.read


class _Cache:
    """K g(n) on disk, shard for shard like the index; checked when opened, made anew if not whole."""

    def __init__(self, index: Index, kernel: Kernel, checkpoint: int) -> None:
        m = index.manifest
        self.index, self.kernel, self.checkpoint = index, kernel, checkpoint
        self.cuts, self.columns, self.dtype = m.shards, m.columns, DTYPES[m.store_dtype]
        self.owner = hashlib.blake2b(
            f"{VERSION} {m.id} {kernel} {checkpoint}".encode(), digest_size=16
        ).hexdigest()
        self.folder = index.folder / "kernels" / self.owner
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if self._sound():
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make()
        except OSError as e:
            self._temporary = tempfile.TemporaryDirectory(prefix="unde-kernel-")
            console.note(
                f"cannot write in {self.folder} ({e.strerror}): this kernel is kept in "
                f"{self._temporary.name} until the program ends"
            )
            self.folder = Path(self._temporary.name)
            self._make()

    def read(self, s: int) -> Tensor:
        return unpack(read_shard(self._path(s), self.owner, verify=False), self.columns)

    def _path(self, s: int) -> Path:
        return self.folder / f"{s:06d}.safetensors"

    def _sound(self) -> bool:
        try:
            for s in range(len(self.cuts)):
                read_shard(self._path(s), self.owner)
        except ShardError:
            return False
        return True

    def _make(self) -> None:
        with locked(self.folder, wait=True):
            if self._sound():  # another process was at it
                return
            m, seen = self.index.manifest, set()
            with console.progress("kernel", 2 * m.examples) as advance:

                def read(s: int) -> Tensor:
                    if s not in seen:
                        seen.add(s)
                        advance(self.cuts[s].stop - self.cuts[s].start)
                    return self.index.block(self.checkpoint, s)

                blocks = [(rows, lambda s=s: read(s)) for s, rows in enumerate(self.cuts)]
                source = _source(self.index, self.kernel)
                own = source is self.index and self.index.method.steps == 1
                fit = None if own else _blocks(source, self.checkpoint)
                parts = _parts(source, self.kernel, self.checkpoint)
                made = self.kernel.apply(blocks, parts, self.index.memory, fit)
                for s, (rows, block) in enumerate(made):
                    write_shard(self._path(s), self.owner, pack(block, self.columns, self.dtype))
                    advance(rows.stop - rows.start)


def _blocks(index: Index, checkpoint: int) -> list[Block]:
    """The features that a kernel is made of; of a trajectory, those of all steps averaged."""
    if index.method.steps > 1:
        return [
            (rows, lambda s=s: torch.stack(index.blocks(s)).mean(0))
            for s, rows in enumerate(index.manifest.shards)
        ]
    return [(rows, lambda s=s: index.block(checkpoint, s)) for s, rows in enumerate(index.manifest.shards)]


def _parts(index: Index, kernel: Kernel, checkpoint: int) -> list[Part]:
    """The parameters of an index, with their covariances if the kernel is made of them."""
    m = index.manifest
    factors = index.factors(checkpoint) if isinstance(kernel, EKFACKernel) else {}
    return [Part(name, columns, factors.get(name)) for name, columns in zip(m.unit_names, m.columns)]
