"""Shards: immutable safetensors files, written under a temporary name, flushed, renamed, and checksummed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from whence.errors import WhenceError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TEMPORARY = ".partial"


class ShardError(WhenceError):
    """A shard that is missing, damaged, or belongs to another index."""


def write_bytes(path: Path, content: bytes) -> None:
    """All of the file or none of it, also after a power cut."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WhenceError(
                f"no space left on the disk while writing {path}: nothing half-written is left behind. "
                "Free some space and run the same call again, it goes on where it stopped"
            ) from e
        raise


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_json(path: Path, value: object) -> None:
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def write_shard(path: Path, owner: str, tensors: Mapping[str, Tensor]) -> None:
    tensors = {k: v.contiguous().cpu() for k, v in tensors.items()}
    # One metadata entry only: the order of several is not fixed in the format's writer.
    meta = json.dumps({"index": owner, "name": path.name, "checksum": checksum(tensors)}, sort_keys=True)
    write_bytes(path, save(tensors, metadata={"whence": meta}))


def read_shard(path: Path, owner: str, verify: bool = True) -> dict[str, Tensor]:
    """The tensors of a shard, after checking that it is whole and belongs to `owner`."""
    try:
        with safe_open(path, framework="pt") as f:
            meta = json.loads((f.metadata() or {}).get("whence", "{}"))
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ShardError(f"shard {path.name} is missing from {path.parent}") from None
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError, OSError) as e:
        raise ShardError(f"shard {path} is truncated or damaged ({e})") from None
    if meta.get("index") != owner or meta.get("name") != path.name:
        raise ShardError(f"shard {path} is foreign: it was written for another index or another place in it")
    if verify and meta.get("checksum") != checksum(tensors):
        raise ShardError(f"shard {path} is damaged: its content does not match its checksum")
    return tensors


def checksum(tensors: Mapping[str, Tensor]) -> str:
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        t = tensors[name]
        h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(t.flatten().view(torch.uint8).numpy().data if t.numel() else b"")
    return h.hexdigest()


def pack(features: Tensor, columns: list[slice], dtype: torch.dtype) -> dict[str, Tensor]:
    """Features in storage precision. float16 keeps one scale for each unit, or small gradients would vanish."""
    if dtype != torch.float16:
        return {"features": features.to(dtype)}
    top = torch.stack([features[:, c].abs().amax() for c in columns]).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.exp2(torch.floor(torch.log2(top)) - 13)  # powers of two: scaling itself rounds nothing
    scaled = features.clone()
    for c, s in zip(columns, scale):
        scaled[:, c] /= s
    return {"features": scaled.to(dtype), "scale": scale}


def unpack(shard: Mapping[str, Tensor], columns: list[slice], rows: slice = slice(None)) -> Tensor:
    features = shard["features"][rows].to(torch.float32)
    if "scale" in shard:
        for c, s in zip(columns, shard["scale"]):
            features[:, c] *= s
    return features
