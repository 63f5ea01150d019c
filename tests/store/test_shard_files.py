"""Shard files: whole or not there, and readable by safetensors."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save

from unde.store.shards import ShardError, read_shard, write_shard


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


def test_any_flipped_bit_is_found(tmp_path):
    """Of the header too: names, types, shapes, offsets, owner and checksum."""
    path = tmp_path / "s.safetensors"
    write_shard(path, "owner", {"a": torch.arange(9.0), "b": torch.tensor([[1, 2]], dtype=torch.uint8)})
    full = path.read_bytes()
    header = 8 + struct.unpack("<Q", full[:8])[0]
    read_shard(path, "owner")
    for at in range(len(full)):
        for bit in (0, 2, 5) if at < header else range(8):
            flipped = bytearray(full)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            of_header = r"s\.safetensors is (truncated|damaged|foreign)"
            said = of_header if at < header else "not match its checksum"
            with pytest.raises(ShardError, match=said):
                read_shard(path, "owner")
            if at >= header:
                assert read_shard(path, "owner", verify=False)  # what verify=False leaves out


def test_blocks_that_changed_places_are_found(tmp_path):
    path = tmp_path / "s.safetensors"
    write_shard(path, "owner", {"a": torch.arange(2**19 + 5).float()})  # two MiB and a little
    full = path.read_bytes()
    a, b = full[-(2**21) - 20 :][: 2**20], full[-(2**20) - 20 : -20]
    path.write_bytes(full[: -(2**21) - 20] + b + a + full[-20:])
    with pytest.raises(ShardError, match="does not match its checksum"):
        read_shard(path, "owner")
