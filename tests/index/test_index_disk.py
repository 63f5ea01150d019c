"""Full disks, folders that hold something else, several processes at once."""

import builtins
import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

import toy
from unde import Index, UndeError
from unde.store import files
from unde.store.locks import locked


class FullDisk:
    """Takes so many bytes, then raises what a full disk raises, in the middle of a write or when flushing."""

    def __init__(self, monkeypatch, room, at):
        self.room, self.at = room, at
        monkeypatch.setattr(files, "open", self.open, raising=False)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def open(self, path, mode, opener):
        file, disk = builtins.open(path, mode, opener=opener), self  # noqa: SIM115

        class File:
            def write(self, content):
                if disk.at == "write" and len(content) > disk.room:
                    file.write(content[: disk.room])
                    file.flush()
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                disk.room -= len(content)
                file.write(content)

            def __enter__(self):
                return self

            def __exit__(self, *exc):
                file.close()

            flush, fileno = file.flush, file.fileno

        return File()

    def fsync(self, fd):
        if self.at == "fsync" and self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("at", ["write", "fsync"])
@pytest.mark.parametrize("room", [0, 0.1, 0.5, 0.9])
def test_a_full_disk_leaves_a_resumable_index(tmp_path, monkeypatch, at, room):
    whole = toy.content(toy.build(tmp_path / "whole").folder)
    with monkeypatch.context() as patch:
        FullDisk(patch, int(room * sum(map(len, whole.values()))), at)
        with pytest.raises(UndeError, match=r"No space left on device.*run the same call again"):
            toy.build(tmp_path / "i")
    left = toy.content(tmp_path / "i")
    assert len(left) < len(whole)
    assert all(whole[name] == content for name, content in left.items())  # whole files only
    assert not list((tmp_path / "i").rglob("*.partial"))
    toy.build(tmp_path / "i")
    assert toy.content(tmp_path / "i") == whole


@pytest.mark.parametrize("foreign", ["notes.txt", "data/a.png", "manifest.json.bak"])
def test_a_folder_that_holds_something_else_is_refused(tmp_path, foreign):
    path = tmp_path / "i" / foreign
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(UndeError, match=rf"holds something else \({foreign.split('/')[0]}\)"):
        toy.build(tmp_path / "i")
    assert [p for p in (tmp_path / "i").rglob("*") if p.is_file()] == [path]
    assert path.read_text() == "mine"


@pytest.mark.parametrize("text", ['{"name": "my app", "icons": []}', "[1, 2]"])
def test_the_manifest_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    for use in (lambda: toy.build(tmp_path), lambda: Index.open(tmp_path)):
        with pytest.raises(UndeError, match="not the manifest of an unde index"):
            use()
    assert (tmp_path / "manifest.json").read_text() == text


def test_places_that_are_no_index(tmp_path):
    (tmp_path / "i").write_text("")
    with pytest.raises(UndeError, match="is a file: an index needs a folder"):
        toy.build(tmp_path / "i")
    with pytest.raises(UndeError, match=r"holds no unde index.*Index\.build"):
        Index.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 1}, r"seed \(0 there, 1 asked for\)"),
        ({"model": toy.net(7)}, r"the model's weights \(other values\)"),
        ({"train_data": toy.data(22, seed=8)}, r"the training data \(same length, other content\)"),
        ({"groups": "tensor"}, r"the groups \(2 there, 4 asked for; e\.g\. '0' is in one only\)"),
        (
            {"groups": {"a": "^0", "b": "^2"}},
            r"the groups \(2 there, 2 asked for; e\.g\. '0' is in one only\)",
        ),
        ({"groups": {"0": "bias", "2": "weight"}}, r"the groups \('0' is not the same\)"),
        ({"groups": {"2": "^2", "0": "^0"}}, r"the groups \(in another order\)"),
        ({"exclude": ["2.bias"]}, r"the parameters \(4 there, 3 asked for; e\.g\. '2.bias' is in one only\)"),
        ({"method": "trak"}, r"method \(.*'tracin'.* there, .*'trak'.* asked for\)"),
        ({"store_dtype": "float16"}, r"store_dtype \('float32' there, 'float16' asked for\)"),
        ({"on_bad": "skip"}, "on_bad"),
        ({"ids": list(range(22))}, "the ids"),
        ({"checkpoints": toy.states(1, 1)}, r"the checkpoints \(1 there, 2 asked for\)"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_another_index_in_the_folder_is_refused(tmp_path, other, said):
    whole = toy.content(toy.build(tmp_path / "i").folder)
    with pytest.raises(UndeError, match=f"already holds another index. What differs:.*{said}"):
        toy.build(tmp_path / "i", **other)
    assert toy.content(tmp_path / "i") == whole


def hold(folder: Path, ready) -> None:
    with locked(folder):
        ready.set()
        time.sleep(60)


def hold_in_a_child(folder: Path, ready) -> None:
    """As a builder with data workers that is killed: its child has inherited the lock, and ends later."""
    with locked(folder):
        if os.fork() == 0:
            time.sleep(1.0)
            os._exit(0)
        ready.set()
        os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(target, folder):
    """One that has the lock by now."""
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    process = fork.Process(target=target, args=(folder, ready))
    process.start()
    assert ready.wait(30)
    return process


def test_two_builders_at_once(tmp_path):
    toy.build(tmp_path / "i")
    with locked(tmp_path / "i"), pytest.raises(UndeError, match="another process is building"):
        toy.build(tmp_path / "i")
    other = in_a_process(hold, tmp_path / "i")
    with pytest.raises(UndeError, match="another process is building"):
        toy.build(tmp_path / "i")
    other.kill()
    other.join()
    toy.build(tmp_path / "i")  # the lock went with the process


def test_workers_that_outlive_a_killed_builder_are_waited_for(tmp_path):
    toy.build(tmp_path / "i")
    in_a_process(hold_in_a_child, tmp_path / "i").join()
    started = time.monotonic()
    toy.build(tmp_path / "i")
    assert time.monotonic() - started > 0.3  # it did wait
