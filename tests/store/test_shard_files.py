"""Shard files: whole or not there, and readable by safetensors."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save

from unde.store.shards import write_shard


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
