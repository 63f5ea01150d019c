"""Shards: immutable safetensors files, written under a temporary name, flushed, renamed, and checksummed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from unde.errors import UndeError
from unde.files import write_atomically

_META, _META_OF_0_1 = "unde", "whence"  # the package was called whence until 0.1
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ShardError(UndeError):
    """A shard that is missing, damaged, or belongs to another index."""


def write_bytes(path: Path, content: bytes) -> None:
    """All of the file or none of it. What a kill leaves is overwritten next time."""
    try:
        write_atomically(path, content)
    except OSError as e:
        raise UndeError(
            f"cannot write {path} ({e.strerror}): nothing half-written is left behind. Make room for "
            f"{len(content):,} bytes there and run the same call again, it goes on where it stopped"
        ) from e


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
        with safe_open(path, framework="pt") as f:
            found = f.metadata() or {}
            meta = json.loads(found.get(_META, found.get(_META_OF_0_1, "{}")))
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ShardError(f"shard {path.name} is missing from {path.parent}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as e:
        raise ShardError(f"shard {path} is truncated or damaged ({e})") from None
    owned = isinstance(meta, dict) and owner in (None, meta.get("index"))
    if not owned or meta.get("name") != (place or path.name):
        raise ShardError(f"shard {path} is foreign: it was written for another index or another place in it")
    if verify and meta.get("checksum") != checksum(tensors):
        raise ShardError(f"shard {path} is damaged: its content does not match its checksum")
    return tensors


def checksum(tensors: Mapping[str, Tensor]) -> str:
    h = hashlib.sha256()  # processors have instructions for it
    for name in sorted(tensors):
        t = tensors[name]
        h.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(t.flatten().view(torch.uint8).numpy().data if t.numel() else b"")
    return h.hexdigest()


def pack(features: Tensor, columns: Sequence[slice], dtype: torch.dtype) -> dict[str, Tensor]:
    """Features in storage precision.

    float16 spans 12 decades only, gradients more. So each example keeps a power of two for each unit that
    lifts its largest entry there just below the largest float16, and rounds as float32 would, to 11 bits.
    """
    if dtype != torch.float16:
        return {"features": features.to(dtype)}
    largest = torch.stack([features[:, c].abs().amax(1) for c in columns], 1)  # (n, U)
    exponent = (torch.frexp(largest).exponent - 15).clamp(-126, 126).to(torch.int8)
    scaled = torch.empty_like(features, dtype=dtype)
    for c, e in zip(columns, torch.exp2(-exponent.float()).unbind(1)):
        scaled[:, c] = features[:, c] * e.unsqueeze(1)
    return {"features": scaled, "exponent": exponent}


def unpack(shard: Mapping[str, Tensor], columns: Sequence[slice]) -> Tensor:
    """(n, D) float32; float32 storage is handed on as it is mapped, without a copy."""
    features = shard["features"].to(torch.float32)
    if "exponent" in shard:
        for c, e in zip(columns, torch.exp2(shard["exponent"].float()).unbind(1)):
            features[:, c] *= e.unsqueeze(1)
    return features
