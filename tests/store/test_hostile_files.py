"""Files that somebody has made up: counts that would be looped over for ever, pipes, links, bombs. Never a hang,
never gigabytes, always one clear error."""

import io
import json
import os
import shutil
import struct
import time
import tracemalloc
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.faults import trial

import toy
from unde import Index, UndeError, Weights
from unde.evaluate import Bank
from unde.index.verify import verify
from unde.methods import EKFAC
from unde.store import layout
from unde.store.manifest import _id
from unde.tasks import Classification

in_time = partial(trial.in_time, 10)


def build(folder: Path) -> Index:
    return toy.build(folder, method=EKFAC(projection="kron(2)", fisher="sampled"), ids=list(range(22)))


@contextmanager
def little_memory():
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "i"
    index = build(folder)
    index.features(toy.data(3, seed=3), folder / layout.QUERIES / "some.safetensors")
    index.score(toy.data(3, seed=3)).total()
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "i"))


def use(folder: Path) -> None:
    """Opened, asked, verified: as somebody would who was given it."""
    index = Index.open(folder, model=toy.net(), task=Classification(), train_data=toy.data(22))
    index.score(index.features(toy.data(3, seed=3), folder / layout.QUERIES / "some.safetensors")).total()
    index.score(toy.data(4, seed=5)).total()


def forge(folder: Path, change) -> None:
    """A manifest that says something else, with the id that belongs to it."""
    path = folder / layout.MANIFEST
    found = json.loads(path.read_text())
    del found["id"]
    change(found)
    path.write_text(json.dumps({"id": _id(found)} | found))


HUGE = [10**9, 10**15, 10**30, -1, 0, 2.5, float("nan"), float("inf"), "12", None, [], True]


@pytest.mark.parametrize(
    "where",
    [
        ("examples",),
        ("resolved", "shard_size"),
        ("resolved", "pass_size"),
        ("units", 0, "size"),
        ("units", 0, "shape", 0),
        ("checkpoint_weights", 0),
        ("models", 0),
    ],
    ids=lambda where: ".".join(map(str, where)),
)
def test_counts_in_a_manifest(whole, copy, where):
    for value in HUGE:
        if where == ("resolved", "pass_size") and value == 10**9:
            continue  # it fits all examples, and says no more

        def change(found, value=value):
            for key in where[:-1]:
                found = found[key]
            found[where[-1]] = value

        shutil.copy(whole / layout.MANIFEST, copy / layout.MANIFEST)
        forge(copy, change)
        with little_memory(), in_time():
            with pytest.raises(UndeError):
                use(copy)
            assert not verify(copy), value


def test_many_checkpoints_that_are_not_there(copy):
    forge(copy, lambda m: m.update(checkpoint_weights=[1.0] * 400_000))
    with in_time(), pytest.raises(UndeError, match="too many files"):
        use(copy)


FILES = [
    "manifest.json",
    "ids.json",
    "projection.safetensors",
    "shards/c00-000001.safetensors",
    "queries/some.safetensors",
    "fisher/manifest.json",
    "fisher/shards/c00-000001.safetensors",
]


def moments(folder):
    return next((folder / "kernels").rglob("moments.safetensors"))


@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_plain_file_is_not_read(copy, tmp_path, name, kind):
    path = copy / name
    if name == layout.MATRICES:
        shutil.rmtree(copy)
        toy.build(copy, method=EKFAC(projection="factored(2)"), ids=list(range(22)))
    path.rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere" if kind == "link" else "/dev/zero")
    with in_time():
        if name.startswith("fisher"):
            shutil.rmtree(copy / "kernels")  # else nobody needs it
        with pytest.raises(UndeError):
            use(copy)
        found = verify(copy)
    assert name in {p.name for p in found.problems}, found


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_files_that_are_made_anew_or_not_needed(copy, tmp_path, kind):
    """A pipe in place of a kernel, a log, a lock or a probe."""
    want = Index.open(copy, model=toy.net(), task=Classification()).score(toy.data(4, seed=5)).total()
    for path in (moments(copy), copy / layout.LOG, copy / layout.PROBE, copy / layout.SOURCE):
        path.unlink(missing_ok=True)
        os.mkfifo(path) if kind == "pipe" else path.symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("mine")
    with in_time():
        index = Index.open(copy, model=toy.net(), task=Classification())
        assert torch.equal(index.score(toy.data(4, seed=5)).total(), want)
        build(copy)
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_lock_that_is_a_pipe_or_a_folder(copy):
    for make in (os.mkfifo, os.mkdir):
        path = copy / layout.LOCK
        path.unlink() if path.is_file() else None
        make(path)
        with in_time(), pytest.raises(UndeError, match=r"cannot take the lock .*\.lock"):
            build(copy)
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("name", [layout.SHARDS, layout.FISHER, layout.KERNELS, layout.QUERIES])
def test_folders_that_lead_elsewhere(copy, tmp_path, name):
    (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.joinpath("elsewhere").rglob("*"))
    with pytest.raises(UndeError, match=f"{name} is a link, which is not followed"):
        use(copy)
    with pytest.raises(UndeError, match="is a link, which is not followed"):
        build(copy)
    assert not verify(copy)
    assert sorted(tmp_path.joinpath("elsewhere").rglob("*")) == before


def test_a_kernel_that_leads_elsewhere(copy, tmp_path):
    path = moments(copy).parent
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UndeError, match="is a link, which is not followed"):
        use(copy)


def test_headers_of_tensors(copy):
    path = copy / "shards/c00-000001.safetensors"
    deep = b'{"__metadata__":{"unde":"' + b"[" * 200_000 + b'"}}'
    for content in (
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 90 * 2**20) + b"{" + b" " * (90 * 2**20),
        struct.pack("<Q", len(deep)) + deep,
        b"",
    ):
        path.write_bytes(content)
        with in_time(), pytest.raises(UndeError, match="damaged"):
            use(copy)


def test_a_shard_that_claims_to_be_huge_is_not_read(copy):
    """Gigabytes that take no room on the disk."""
    path, size = copy / "shards/c00-000001.safetensors", 2**33
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    header["features"] |= {"shape": [size // 4], "data_offsets": [0, size]}
    rest = {k: header[k] for k in ("__metadata__", "features")}
    text = json.dumps(rest).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + size)
    with in_time():
        started = time.monotonic()
        with pytest.raises(UndeError, match="is not in its plan"):
            use(copy)
        assert not verify(copy)
        build(copy)
        assert time.monotonic() - started < 5
    assert verify(copy)


def test_deep_and_long_json(copy, tmp_path, monkeypatch):
    deep = "[" * 200_000 + "]" * 200_000
    Weights(torch.ones(2), ["a", "b"]).save(tmp_path / "w.json")
    (tmp_path / "w.json").write_text('{"format": "unde weights", "weights": ' + deep + "}")
    with pytest.raises(UndeError, match="nested too deeply"):
        Weights.load(tmp_path / "w.json")
    (copy / "ids.json").write_text(deep)
    with pytest.raises(UndeError, match=r"ids\.json is missing or damaged"):
        use(copy)
    monkeypatch.setattr("unde.store.files._CONTAINERS", 100)
    (copy / "manifest.json").write_text("[" + "{}," * 200 + "{}]")
    with pytest.raises(UndeError, match="more than 100 lists and objects"):
        use(copy)


def test_weights_and_banks_that_are_no_plain_files(tmp_path):
    for name, read in (("w.json", Weights.load), ("b.npz", Bank.open)):
        os.mkfifo(tmp_path / name)
        with in_time(), pytest.raises(UndeError, match="no plain file"):
            read(tmp_path / name)
        (tmp_path / f"link-{name}").symlink_to("/dev/zero")
        with in_time(), pytest.raises(UndeError, match="no plain file"):
            read(tmp_path / f"link-{name}")


def test_a_bank_whose_index_lies_about_what_is_packed(tmp_path):
    """1.2 MB that unpack to a gigabyte, called a kilobyte by the archive."""
    path = tmp_path / "b.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("masks.npy", "w") as entry:
        header = io.BytesIO()
        shape = {"descr": "|u1", "fortran_order": False, "shape": (900,)}
        np.lib.format.write_array_header_1_0(header, shape)
        entry.write(header.getvalue())
        for _ in range(256):
            entry.write(bytes(2**20))
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02") + 24  # uncompressed size in the central directory
    content[at : at + 4] = struct.pack("<I", len(header.getvalue()) + 900)
    path.write_bytes(content)
    assert len(content) < 2**19
    with little_memory(), in_time(), pytest.raises(UndeError, match="not a bank that can be read"):
        Bank.open(path)


def test_query_features_of_another_shape(copy):
    from unde.index.query_features import PLACE
    from unde.store.shards import read_shard, write_shard

    path = copy / "queries/some.safetensors"
    owner = json.loads((copy / "manifest.json").read_text())["id"]
    tensors = {k: v.clone() for k, v in read_shard(path, owner, place=PLACE).items()}
    for change in (
        {"features": tensors["features"][:, :, :-1]},
        {"features": tensors["features"].repeat(2, 1, 1)},
        {"loss": tensors["loss"][:, :2]},
        {"digest": tensors["digest"][:, None]},
        {"digest": torch.tensor(3)},
        {"more": torch.ones(1)},
    ):
        write_shard(path, owner, tensors | change, PLACE)
        with pytest.raises(UndeError, match="does not hold query features of this index"):
            use(copy)
    del tensors["loss"]
    write_shard(path, owner, tensors, PLACE)
    with pytest.raises(UndeError, match="does not hold query features of this index"):
        use(copy)
