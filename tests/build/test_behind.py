"""Shards are written while the next one is computed: in order, whole, from memory that nobody fills meanwhile."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from safetensors.torch import save

from unde.build.behind import Behind
from unde.store.shards import write_shard


def test_one_write_at_a_time_while_the_next_shard_is_computed():
    behind, go, seen = Behind(at_once=False), threading.Event(), []

    def write(x: torch.Tensor) -> None:
        assert go.wait(10)
        seen.append(x.clone())

    first = behind.memory(3, 2).fill_(1.0)
    behind.write(write, first, keeps=True)
    second = behind.memory(3, 2).fill_(2.0)  # the first is still being written
    assert not seen
    go.set()
    behind.write(write, second, keeps=True)
    third = behind.memory(2, 2)
    behind.wait()
    behind.close()
    assert [x.unique().tolist() for x in seen] == [[1.0], [2.0]]
    assert third.data_ptr() == first.data_ptr()  # two shards share their memory with all others


def test_the_error_of_a_write_is_raised_by_the_next_or_at_the_end():
    def fail() -> None:
        raise OSError("full")

    behind = Behind(at_once=False)
    behind.write(fail, keeps=False)
    with pytest.raises(OSError, match="full"):
        behind.write(lambda: None, keeps=False)
    behind.write(fail, keeps=False)
    with pytest.raises(OSError, match="full"):
        behind.wait()
    behind.wait()  # told once
    behind.close()


def test_workers_elsewhere_write_before_they_say_that_a_job_is_done():
    seen: list[int] = []
    Behind().write(seen.append, 1, keeps=True)
    assert seen == [1]


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
