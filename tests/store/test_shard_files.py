"""Shard files: whole or not there, and readable by safetensors."""

from __future__ import annotations

import errno
import io
import json

import pytest
import torch
from safetensors.torch import save

from unde.store import files
from unde.store.files import CannotWrite
from unde.store.shards import write_shard


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, monkeypatch):
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CannotWrite, match=r"cannot write .*a\.safetensors \(No space left on device\)"):
        write_shard(tmp_path / "a.safetensors", "owner", {"x": torch.ones(2)})
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_begun_leaves_nothing(tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, part):
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path, mode, opener):
        return Full(opener(path, 0), "wb")

    monkeypatch.setattr(files, "open", opened, raising=False)
    with pytest.raises(CannotWrite, match="nothing half-written is left behind"):
        write_shard(tmp_path / "a.safetensors", "owner", {"x": torch.ones(2)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (7,), ()])
def test_a_file_is_what_safetensors_makes_of_the_tensors(tmp_path, shape):
    kinds = (
        torch.float64, torch.int64, torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.float16
    )  # fmt: skip
    tensors = {f"é{i}": (10 * torch.randn(shape)).to(kind) for i, kind in enumerate(kinds)}
    tensors["transposed"] = torch.randn(4, 6).T
    path = tmp_path / "a.safetensors"
    write_shard(path, "owner", tensors)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    meta = json.loads(content[8 : 8 + length])["__metadata__"]
    assert content == save({k: v.contiguous() for k, v in tensors.items()}, metadata=meta)
