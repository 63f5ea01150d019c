"""The training side under a kernel, as scores are made with it: block by block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unde.errors import UndeError
from unde.index.kernel_cache import KernelFiles, handed_on
from unde.index.reader import Stored
from unde.kernels import Kernel
from unde.parallel import SERIAL, Executor
from unde.store.dequantize import Block, Packed
from unde.store.file_watch import FileWatch
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.safe_io import ahead

KEPT = 4  # blocks stay in memory if all of them take at most this fraction of the budget, 1 in 4
AHEAD = 2**25  # bytes that the disk is asked for before they are needed


class Training:
    """The training side under a kernel, block by block, and K for what it is multiplied with.

    Where K is block-diagonal it acts on the query side, and blocks are the features as they are stored; else blocks
    are K g(n).
    """

    def __init__(self, stored: Stored, kernel: Kernel, executor: Executor = SERIAL) -> None:
        m = stored.manifest
        self.cuts = m.shards
        self._kernels = [KernelFiles(stored, kernel, c, executor) for c in range(m.terms)]
        self.mixes = self._kernels[0].settled.blocks
        if self.mixes is None and stored.codec.lossy:
            raise UndeError(
                f"{stored.folder} is stored as {m.store_dtype}, in which K g(n) cannot be: {kernel} has to act on the "
                "query side (its `blocks`), or build with store_dtype='int8'"
            )
        if self.mixes is None:
            for k in self._kernels:
                k.make_rows()
        else:
            for k in self._kernels:
                k.fitted()
        self._keep = kept(m, stored.memory)
        self._kept: dict[int, list[Tensor]] = {}
        self._stored = stored
        shard = m.terms * stored.codec.nbytes(min(m.examples, m.settled.shard_size), m.columns)
        self._ahead, self._asked = max(1, AHEAD // shard), -2

    def block(self, s: int) -> list[Tensor]:
        """The rows `cuts[s]`, (n, D) for each checkpoint."""
        self._look_ahead(s)
        if s in self._kept and not any(watch.changed(path) for watch, path in self._files(s)):
            return self._kept[s]
        parts = self._stored.blocks(s) if self.mixes is not None else [k.rows(s) for k in self._kernels]
        if self._keep:
            self._kept[s] = parts
        return parts

    def packed(self, s: int) -> Sequence[Block]:
        """The same to be multiplied: as it is stored, where it would have to be unpacked and is not kept."""
        if self._keep or handed_on(self._stored.manifest):
            return self.block(s)
        self._look_ahead(s)
        m, codec = self._stored.manifest, self._stored.codec
        names = codec.layout(1, m.columns)
        return [Packed(codec, m.columns, {name: shard[name] for name in names}) for shard in self._packed(s)]

    def rows(self, s: int, local: Tensor) -> list[Tensor]:
        """Some of the rows `cuts[s]`, by their number there: no others are unpacked."""
        if self._keep:
            return [part.index_select(0, local) for part in self.block(s)]
        m, codec = self._stored.manifest, self._stored.codec
        names = codec.layout(1, m.columns)
        return [
            codec.unpack({name: shard[name].index_select(0, local) for name in names}, m.columns)
            for shard in self._packed(s)
        ]

    def _packed(self, s: int) -> list[dict[str, Tensor]]:
        """Shard s as it is stored, under each checkpoint."""
        if self.mixes is None:
            return [k.packed(s) for k in self._kernels]
        return [self._stored.packed(c, s) for c in range(self._stored.manifest.terms)]

    def _look_ahead(self, s: int) -> None:
        """Asks the disk for the shards that follow, while this one is multiplied."""
        if s in self._kept or s == self._asked:
            return
        first = s + 1 if s != self._asked + 1 else s + self._ahead
        self._asked = s
        for later in range(first, min(s + self._ahead + 1, len(self.cuts))):
            for path in self._paths(later):
                ahead(path)

    def _paths(self, s: int) -> list[StorePath]:
        if self.mixes is None:
            return [k.path(s) for k in self._kernels]
        m = self._stored.manifest
        return [m.shard(self._stored.folder, c, s) for c in range(m.terms)]

    def _files(self, s: int) -> list[tuple[FileWatch, StorePath]]:
        """What the blocks of shard s are mapped from for as long as they are kept; nothing where they are not."""
        if not handed_on(self._stored.manifest):
            return []
        watches = [self._stored.watch if self.mixes is not None else k.watch for k in self._kernels]
        return list(zip(watches, self._paths(s)))

    def on_queries(self, checkpoint: int, rows: Tensor) -> Tensor:
        """What is multiplied with blocks, of query features (n, D)."""
        return rows if self.mixes is None else self._kernels[checkpoint].fitted().apply(rows)

    def transformed(self, checkpoint: int, rows: Tensor) -> Tensor:
        """K applied to features (n, D)."""
        return self._kernels[checkpoint].fitted().apply(rows)


def kept(m: Manifest, memory: int) -> bool:
    """Whether blocks stay in memory once they were read."""
    return 4 * m.examples * m.width * m.terms <= memory // KEPT
