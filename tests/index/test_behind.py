"""Shards reach the disk while the next one is computed: in order, whole, and out of memory that is free at once."""

from __future__ import annotations

import errno
import io
import json
import threading

import pytest
import torch
from safetensors.torch import save

from unde.index.background_writer import Behind
from unde.store import files
from unde.store.files import CannotWrite
from unde.store.shards import read_shard, write_shard


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that is waited for until `set`; and the files that have reached it."""
    go, settled = threading.Event(), []

    def settle(*place):
        assert go.wait(10)
        settled.append(place[-1].name)
        return files_settle(*place)

    files_settle = files._settle
    monkeypatch.setattr(files, "_settle", settle)
    return go, settled


def test_the_disk_is_waited_for_while_the_next_shard_is_computed(tmp_path, slow_disk):
    go, settled = slow_disk
    behind, names = Behind(at_once=False), ["a.safetensors", "b.safetensors"]
    first = behind.memory(3, 2).fill_(1.0)
    behind.write(tmp_path / names[0], "owner", {"x": first})
    second = behind.memory(2, 2).fill_(2.0)  # the memory of the first, which is not yet on the disk
    assert second.data_ptr() == first.data_ptr() and not settled
    assert not (tmp_path / names[0]).exists()
    go.set()
    behind.write(tmp_path / names[1], "owner", {"x": second})
    assert settled[:1] == names[:1]  # one at a time
    second.fill_(3.0)
    behind.wait()
    behind.close()
    assert settled == names and sorted(p.name for p in tmp_path.iterdir()) == names
    stored = [read_shard(tmp_path / name, "owner")["x"] for name in names]
    assert torch.equal(stored[0], torch.ones(3, 2)) and torch.equal(stored[1], torch.full((2, 2), 2.0))


def test_the_error_of_a_disk_is_raised_by_the_next_write_or_at_the_end(tmp_path, monkeypatch):
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    behind = Behind(at_once=False)
    monkeypatch.setattr("os.fsync", full)
    behind.write(tmp_path / "a.safetensors", "owner", {"x": torch.ones(2)})
    with pytest.raises(CannotWrite, match=r"cannot write .*a\.safetensors \(No space left on device\)"):
        behind.write(tmp_path / "b.safetensors", "owner", {"x": torch.ones(2)})
    behind.write(tmp_path / "c.safetensors", "owner", {"x": torch.ones(2)})
    with pytest.raises(CannotWrite, match=r"c\.safetensors"):
        behind.wait()
    behind.wait()  # told once
    behind.close()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_begun_leaves_nothing(tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, part):
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path, mode, opener):
        return Full(opener(path, 0), "wb")

    monkeypatch.setattr(files, "open", opened, raising=False)
    with pytest.raises(CannotWrite, match="nothing half-written is left behind"):
        Behind(at_once=False).write(tmp_path / "a.safetensors", "owner", {"x": torch.ones(2)})
    assert list(tmp_path.iterdir()) == []


def test_workers_elsewhere_write_before_they_say_that_a_job_is_done(tmp_path):
    Behind().write(tmp_path / "a.safetensors", "owner", {"x": torch.ones(2)})
    assert torch.equal(read_shard(tmp_path / "a.safetensors", "owner")["x"], torch.ones(2))


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
