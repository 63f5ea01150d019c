"""Shards: immutable safetensors files, each with a checksum, the index it belongs to and its place there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from unde.errors import UndeError
from unde.store.files import write_bytes
from unde.store.reading import check_header

_META, _META_OF_0_1 = "unde", "whence"  # the package was called whence until 0.1
WRITTEN = 2  # times that a file is in memory while it is written, beside the tensors
_TYPES = {  # as they are called in a file, in the order that they have there
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class ShardError(UndeError):
    """A shard that is missing, damaged, or belongs to another index."""


def write_shard(path: Path, owner: str, tensors: Mapping[str, Tensor], place: str | None = None) -> None:
    """Write tensors that belong to `owner` and to one place in it, by default the file's name."""
    tensors = {k: v.contiguous().cpu() for k, v in tensors.items()}
    # One metadata entry only: the order of several is not fixed in the format's writer.
    meta = {"checksum": checksum(tensors), "index": owner, "name": place or path.name}
    write_bytes(path, save(tensors, metadata={_META: json.dumps(meta)}))


def read_shard(
    path: Path, owner: str | None, verify: bool = True, place: str | None = None
) -> dict[str, Tensor]:
    """The tensors of a shard, mapped from the file, once it is known to be whole and to belong to `owner`
    (None: whoever it is)."""
    try:
        check_header(path)
        with safe_open(path, framework="pt") as f:
            found = f.metadata() or {}
            meta = json.loads(found.get(_META, found.get(_META_OF_0_1, "{}")))
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ShardError(f"shard {path.name} is missing from {path.parent}") from None
    except OSError as e:
        raise ShardError(f"shard {path} is unreadable ({e.strerror or e})") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as e:
        raise ShardError(f"shard {path} is truncated or damaged ({e})") from None
    owned = isinstance(meta, dict) and owner in (None, meta.get("index"))
    if not owned or meta.get("name") != (place or path.name):
        raise ShardError(f"shard {path} is foreign: it was written for another index or another place in it")
    if verify and meta.get("checksum") != checksum(tensors):
        raise ShardError(f"shard {path} is damaged: its content does not match its checksum")
    return tensors


def sound(path: Path, owner: str) -> bool:
    """Whether a whole file of `owner` is there."""
    try:
        read_shard(path, owner)
    except ShardError:
        return False
    return True


def file_bytes(tensors: Mapping[str, Tensor], place: str) -> int:
    """Bytes of the file that `write_shard` makes of tensors like these, which may be on the meta device.

    >>> file_bytes({"loss": torch.empty(10, device="meta")}, "c00-000000.safetensors")
    312
    """
    meta = {"checksum": "0" * 64, "index": "0" * 32, "name": place}
    header: dict[str, Any] = {"__metadata__": {_META: json.dumps(meta)}}
    order, at = list(_TYPES), 0
    for name, t in sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])):
        found = {"dtype": _TYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        header[name], at = found, at + t.nbytes
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-length // 8) * 8 + at


def checksum(tensors: Mapping[str, Tensor]) -> str:
    h = hashlib.sha256()  # processors have instructions for it
    for name in sorted(tensors):
        t = tensors[name]
        h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(t.flatten().view(torch.uint8).numpy().data if t.numel() else b"")
    return h.hexdigest()
