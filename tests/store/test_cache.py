"""Copies of remote shards on this machine: checked, replaced when damaged, and no more than there is room for."""

import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

import toy
from unde import UndeError
from unde.store.cache import Cache
from unde.store.remote import Remote
from unde.store.shards import ShardError, read_shard, write_shard

SHARD = {"features": torch.arange(1000.0)}


@pytest.fixture
def fetches(monkeypatch):
    """The names of all objects that were fetched."""
    names, real = [], Remote.download

    def download(self, file):
        names.append(self.name)
        real(self, file)

    monkeypatch.setattr(Remote, "download", download)
    return names


def put(memory, name="a.safetensors", tensors=SHARD, owner="me"):
    """As another machine would, without a copy here."""
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder) / name, owner, tensors)
        (memory / name).write_bytes((Path(folder) / name).read_bytes())
    return memory / name


def copies():
    return sorted(Cache.for_user().folder.glob("*/*"))


def test_a_shard_is_fetched_once_and_the_store_not_asked_again(memory, fetches):
    shard = put(memory)
    for verify in (False, True, False):
        assert torch.equal(read_shard(shard, "me", verify)["features"], SHARD["features"])
    assert fetches == ["a.safetensors"]
    with mock.patch.object(Remote, "info", side_effect=AssertionError("asked")):
        assert torch.equal(read_shard(shard, "me", verify=False)["features"], SHARD["features"])


def test_what_was_written_here_is_not_fetched(memory, fetches):
    write_shard(memory / "a.safetensors", "me", SHARD)
    assert torch.equal(read_shard(memory / "a.safetensors", "me")["features"], SHARD["features"])
    assert fetches == []


@pytest.mark.parametrize(("damage", "verify"), [("flipped", True), ("cut", True), ("cut", False)])
def test_a_damaged_copy_is_replaced(memory, fetches, damage, verify):
    shard = put(memory)
    read_shard(shard, "me")
    [copy] = copies()
    if damage == "flipped":
        toy.flip(copy, -7, 3)
    else:
        copy.write_bytes(copy.read_bytes()[:-100])
    assert torch.equal(read_shard(shard, "me", verify)["features"], SHARD["features"])
    assert fetches == ["a.safetensors"] * 2
    assert len(copies()) == 1


def test_a_damaged_object_is_found_without_being_asked(memory):
    """A fetched shard is checked once, and not kept if it is damaged."""
    shard = put(memory)
    toy.flip(shard, -7, 3)
    said = rf"shard {shard} is damaged: its content does not match its checksum"
    with pytest.raises(ShardError, match=said):
        read_shard(shard, "me", verify=False)
    assert copies() == []


def test_an_object_or_an_index_that_was_replaced(memory):
    shard = put(memory)
    read_shard(shard, None)
    put(memory, tensors={"features": torch.zeros(1000)})
    assert not read_shard(shard, None, verify=False)["features"].any()
    assert not read_shard(shard, "me")["features"].any()
    put(memory, tensors={"features": torch.zeros(1000)}, owner="you")
    assert not read_shard(shard, "you", verify=False)["features"].any()
    with pytest.raises(ShardError, match="is foreign"):
        read_shard(shard, "me")


def test_a_missing_object(memory):
    with pytest.raises(ShardError, match=rf"a\.safetensors is missing from {memory}"):
        read_shard(memory / "a.safetensors", "me")


def test_what_was_not_used_for_longest_goes_first(memory, fetches, monkeypatch):
    monkeypatch.setenv("UNDE_CACHE_BYTES", "13kB")  # room for three
    shards = [put(memory, f"{i}.safetensors") for i in range(4)]
    mapped = [read_shard(s, "me") for s in shards[:3]]
    of = [Cache.for_user().newest(shard) for shard in shards[:3]]
    for age, copy in enumerate(of):
        os.utime(copy, (1000 + age, 1000 + age))
    read_shard(shards[0], "me")  # used again
    read_shard(shards[3], "me")
    assert [copy.exists() for copy in of] == [True, False, True]
    assert len(copies()) == 3
    assert torch.equal(mapped[1]["features"], SHARD["features"])  # still mapped
    fetches.clear()
    read_shard(shards[0], "me")
    assert fetches == []


def test_a_shard_larger_than_the_cache_is_read(memory, monkeypatch):
    monkeypatch.setenv("UNDE_CACHE_BYTES", "1kB")
    for name in ("a.safetensors", "b.safetensors"):
        assert torch.equal(read_shard(put(memory, name), "me")["features"], SHARD["features"])
    assert len(copies()) == 1


def test_downloads_that_were_killed_are_cleared_in_time(memory, monkeypatch):
    monkeypatch.setattr("unde.store.cache.SHARE", 10**12)
    read_shard(put(memory), "me")
    folder = copies()[0].parent
    old, new = folder / "x.1.partial", folder / "x.2.partial"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    read_shard(put(memory, "b.safetensors"), "me")
    assert new.exists()
    assert not old.exists()


def test_a_cache_that_cannot_be_written(memory, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    shard = put(memory)
    monkeypatch.setenv("UNDE_CACHE", str(tmp_path / "file"))
    write_shard(memory / "b.safetensors", "me", SHARD)  # needs no copy
    said = rf"cannot keep a copy of {shard} in .*: make room there, or set UNDE_CACHE"
    with pytest.raises(UndeError, match=said):
        read_shard(shard, "me")
