"""K g(n) beside the shards: made once, checked when it is used again, made anew if it is not whole."""

import gc
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import toy
from unde import Index, UndeError
from unde.index import kernel_cache as files
from unde.kernels import Gram
from unde.kernels.trak import _FullGram
from unde.methods import TRAK
from unde.store import shards

QUERIES = toy.data(4, seed=3)


@pytest.fixture
def index(tmp_path):
    return toy.build(tmp_path / "i", method=TRAK(projection="none", damping=0.5))


def kernel_files(index) -> list[Path]:
    """K g(n), shard by shard."""
    return sorted((index.folder / "kernels").rglob("[0-9]*.safetensors"))


def moments(index) -> list[Path]:
    """What kernels are made of, whatever their damping."""
    return sorted((index.folder / "kernels").rglob("moments.safetensors"))


def stamps(index) -> list[int]:
    return [p.stat().st_mtime_ns for p in kernel_files(index)]


class Counted:
    """How often a kernel is inverted, and shards of features or of K g(n) are read, from here on."""

    def __init__(self, monkeypatch):
        self.applied = self.read = 0
        inverse, read = _FullGram.inverse, shards.read_shard

        def count_inverse(*args):
            self.applied += 1
            return inverse(*args)

        def count_read(path, *args, **options):
            self.read += path.name != "moments.safetensors"
            return read(path, *args, **options)

        monkeypatch.setattr(_FullGram, "inverse", count_inverse)
        for module in ("store.shards", "index.kernel_cache", "index.reader"):
            monkeypatch.setattr(f"unde.{module}.read_shard", count_read)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_it_is_the_kernel_of_the_features(tmp_path, dtype):
    index = toy.build(tmp_path / "i", method=TRAK(damping=0.5, projection="none"), store_dtype=dtype)
    phi = toy.stored(index).rows(torch.arange(22))[0].double()
    gram = phi.T @ phi
    want = phi @ torch.linalg.inv(gram + 0.5 * gram.diagonal().mean() * torch.eye(57))
    got = torch.cat([toy.training(index, index.method).block(s)[0] for s in range(3)])
    rounding = {"float32": 2e-6, "float16": 2**-10}[dtype]
    assert ((got - want).norm(dim=1) <= rounding * want.norm(dim=1)).all()


def test_it_is_made_once_for_each_damping_from_the_same_moments(index, monkeypatch):
    counted = Counted(monkeypatch)
    first = index.score(QUERIES).total()
    assert counted.applied == 1
    before = stamps(index)
    assert len(before) == 3
    index.score(QUERIES).total([1.0, 2.0])
    index.self_influence(normalize_top=2)
    again = toy.reopen(index).score(QUERIES).total()
    assert counted.applied == 1
    assert stamps(index) == before
    assert torch.equal(first, again)
    totals = [index.score(QUERIES, method=TRAK(damping=x)).total() for x in (0.5, 5.0, 0.5, 5.0)]
    assert counted.applied == 2
    assert len(moments(index)) == 1
    assert len(kernel_files(index)) == 6
    assert torch.equal(totals[0], totals[2])
    assert torch.equal(totals[1], totals[3])
    assert not torch.allclose(totals[0], totals[1], rtol=0.1)


@pytest.mark.parametrize(
    "what", ["truncated", "flipped", "missing", "swapped", "of another kernel", "empty", "moments"]
)
def test_a_damaged_cache_is_made_anew(index, monkeypatch, what):
    want = index.score(QUERIES).total()
    whole = toy.content(index.folder)
    a, b, c = kernel_files(index)
    if what == "moments":
        moments(index)[0].write_bytes(b"")
        for path in (a, b, c):
            path.unlink()
    elif what == "missing":
        a.unlink()
    elif what == "swapped":
        kept = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(kept)
    elif what == "of another kernel":
        index.score(QUERIES, method=TRAK(damping=9.0))
        other = next(p for p in kernel_files(index) if p.parent != a.parent and p.name == a.name)
        shutil.copy(other, a)
        shutil.rmtree(other.parent)
    elif what == "flipped":
        toy.flip(a, -9)
    else:
        a.write_bytes(b"" if what == "empty" else a.read_bytes()[:-9])
    counted = Counted(monkeypatch)
    assert torch.equal(toy.reopen(index).score(QUERIES).total(), want)
    assert counted.applied == 1
    assert toy.content(index.folder) == whole


def test_checkpoints_have_kernels_of_their_own(tmp_path, monkeypatch):
    index = toy.build(tmp_path / "i", checkpoints=toy.states(1, 2), method="trak")
    want = index.score(QUERIES).total()
    files = kernel_files(index)
    assert len(files) == 6
    one, two = files[0], next(p for p in files[1:] if p.name == files[0].name)
    shutil.copy(one, two)
    counted = Counted(monkeypatch)
    assert torch.equal(toy.reopen(index).score(QUERIES).total(), want)
    assert counted.applied == 1  # of the checkpoint that was damaged


def test_leftovers_of_a_kill_are_cleared_and_whole_kernels_only_read(index, monkeypatch):
    index.score(QUERIES)
    path = kernel_files(index)[1]
    path.unlink()
    path.with_name(path.name + ".partial").write_bytes(b"half")
    toy.reopen(index).score(QUERIES)
    assert not list(index.folder.rglob("*.partial"))
    assert len(kernel_files(index)) == 3
    counted = Counted(monkeypatch)
    monkeypatch.setattr(files.Path, "mkdir", lambda *a, **k: pytest.fail("tried to write"))
    toy.reopen(index).score(QUERIES).total()
    assert counted.applied == 0


def _die_while_writing(folder: Path, after: int) -> None:
    torch.set_num_threads(1)
    real, written = files.write_shard, []

    def write(path, *rest):
        if len(written) == after:
            path.with_name(path.name + ".partial").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(path)
        real(path, *rest)

    files.write_shard = write
    made = Index.open(folder, model=toy.net(), task=toy.Classification())
    made.score(QUERIES)


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_kill_while_it_is_made(index, after):
    want = toy.build(index.folder.with_name("other"), method=index.method).score(QUERIES).total()
    child = multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(index.folder, after))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert len(moments(index) + kernel_files(index)) == after
    assert torch.equal(toy.reopen(index).score(QUERIES).total(), want)
    assert not list(index.folder.rglob("*.partial"))


def test_two_processes_make_it_once(index, monkeypatch):
    """The second waits for the first, then finds all there."""
    index.score(QUERIES)
    made = {path: path.read_bytes() for path in kernel_files(index)}
    for path in made:
        path.unlink()
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()

    def first():
        with files.locked(path.parent):
            ready.set()
            time.sleep(0.5)
            for name, content in made.items():
                name.write_bytes(content)

    other = fork.Process(target=first)
    other.start()
    assert ready.wait(30)
    counted = Counted(monkeypatch)
    toy.reopen(index).score(QUERIES)
    other.join()
    assert counted.applied == 0


def test_where_nothing_can_be_written(index, monkeypatch, capsys):
    """A read-only index is scored all the same; here a file is where the folder of kernels would be."""
    want = toy.build(index.folder.with_name("other"), method=index.method).score(QUERIES).total()
    (index.folder / "kernels").write_text("")
    opened = toy.reopen(index)
    assert torch.equal(opened.score(QUERIES).total(), want)
    said = capsys.readouterr().err
    assert "cannot write in" in said
    elsewhere = Path(said.split("is kept in ")[1].split(" until")[0])
    assert len(list(elsewhere.glob("*.safetensors"))) == 3
    del opened
    gc.collect()
    assert not elsewhere.exists()


def test_the_memory_budget_is_that_of_the_index(index):
    small = toy.reopen(index, memory=1000)
    with pytest.raises(UndeError, match=r"kernel \(22 × 22\) needs"):
        small.score(QUERIES)
    assert not kernel_files(index)


def test_small_indexes_are_read_once_and_large_ones_each_time(index, monkeypatch):
    """A weighted total reads what an unweighted one does: nothing more, once the blocks are there."""
    scores = index.score(QUERIES)
    counted = Counted(monkeypatch)
    scores.total()
    assert counted.read == 3
    scores.total([0.5, 1.5])
    scores.by_group()
    index.score(QUERIES).total([0.1, 1.9])
    assert counted.read == 3
    need = 4 * 22 * 57
    large = toy.reopen(index, memory=max(4 * need - 1, 2 * 8 * 22**2)).score(QUERIES)
    counted.read = 0
    total = large.total()
    large.total([0.5, 1.5])
    assert counted.read == 6
    assert torch.equal(total, scores.total())


def test_two_kernels_are_held_at_most(index):
    for damping in (0.1, 0.2, 0.3, 0.4):
        index.score(QUERIES, method=TRAK(damping=damping))
    assert list(index._state.scorer._features) == [Gram(0.3), Gram(0.4)]
    kept = toy.training(index, TRAK(damping=0.3))
    index.score(QUERIES, method=TRAK(damping=0.5))
    assert toy.training(index, TRAK(damping=0.3)) is kept  # the one used last stays
