"""The training side with its kernel applied, K g(n): computed once, kept beside the shards, read in blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from whence.index.store import DTYPES, ShardError, pack, read_shard, unpack, write_shard
from whence.methods import Method

if TYPE_CHECKING:
    from whence.index.index import Index

Reader = Callable[[], Iterator[tuple[slice, Tensor]]]


def preconditioned(index: Index, method: Method, checkpoint: int) -> Reader:
    """A reader of (rows, K g(n)) blocks; the kernel is applied on the first call for this method."""
    if method.kernel is None:
        return lambda: index.blocks(checkpoint)
    owner = hashlib.blake2b(f"{index.manifest.id} {json.dumps(method.describe())}".encode(), digest_size=8).hexdigest()
    folder = index.folder / "kernels" / f"{owner}-c{checkpoint:02d}"
    columns, dtype = index.manifest.columns, DTYPES[index.manifest.store_dtype]

    def path(rows: slice) -> Path:
        return folder / f"{rows.start:09d}.safetensors"

    cuts = [slice(r.start, r.stop) for r in index.manifest.shards]
    if not all(_sound(path(rows), owner) for rows in cuts):
        folder.mkdir(parents=True, exist_ok=True)
        blocks = method.kernel.apply(
            lambda: index.blocks(checkpoint), len(index), index.manifest.width, index.memory
        )
        for rows, block in blocks:
            write_shard(path(rows), owner, pack(block, columns, dtype))

    def read() -> Iterator[tuple[slice, Tensor]]:
        for rows in cuts:
            yield rows, unpack(read_shard(path(rows), owner, verify=False), columns)

    return read


def _sound(path: Path, owner: str) -> bool:
    try:
        read_shard(path, owner)
    except ShardError:
        return False
    return True
