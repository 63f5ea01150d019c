"""The folder of an index: what is ours in it, what damage is answered with, and that the advice restores it."""

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

import toy
from unde import Index, UndeError
from unde.methods import EKFAC
from unde.store import files, layout
from unde.store.locks import locked

METHOD = EKFAC(projection="kron(3)", fisher="sampled")


def test_the_fisher_of_another_index(tmp_path):
    one = toy.build(tmp_path / "a", method=METHOD)
    other = toy.build(tmp_path / "b", method=METHOD, model=toy.net(3))
    want = one.score(toy.data(3, seed=3)).total()
    whole = toy.content(one.folder)
    shutil.rmtree(one.folder / "fisher")
    shutil.rmtree(one.folder / "kernels")
    shutil.copytree(other.folder / "fisher", one.folder / "fisher")
    said = "fisher is of another index: delete that folder and run the same Index"
    with pytest.raises(UndeError, match=said):
        toy.reopen(one).score(toy.data(3, seed=3))
    shutil.rmtree(one.folder / "fisher")
    again = toy.build(tmp_path / "a", method=METHOD)
    assert torch.equal(again.score(toy.data(3, seed=3)).total(), want)
    assert toy.content(one.folder) == whole


def test_planted_links_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "i"
    folder.mkdir()
    for name in ("manifest.json.partial", "ids.json.partial"):
        os.symlink(victim, folder / name)
    toy.build(folder, ids=list(range(22)))
    assert victim.read_text() == "mine"
    (folder / layout.LOCK).unlink()
    os.symlink(victim, folder / layout.LOCK)
    with pytest.raises(UndeError, match=r"\.lock.*link"), locked(folder):
        pass
    assert victim.read_text() == "mine"
    os.symlink(victim, tmp_path / "file")
    files.write_atomically(tmp_path / "file", b"new")
    assert victim.read_text() == "mine"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()


def test_writers_at_once_do_not_meet(tmp_path, monkeypatch):
    """One that writes while another is at it: both names are their own."""
    names = []
    real = os.replace

    def replace(a, b):
        names.append(str(a))
        if len(names) == 1:
            files.write_atomically(tmp_path / "file", b"second")
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    files.write_atomically(tmp_path / "file", b"first")
    assert len(set(names)) == 2
    assert (tmp_path / "file").read_bytes() == b"first"


def test_what_has_a_name_is_on_the_disk(tmp_path, monkeypatch):
    """A power cut finds the old file or all of the new one: the content is synced, then renamed, then the name is."""
    steps, replace = [], os.replace

    def sync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            steps.append(("folder", sorted(p.name for p in tmp_path.iterdir())))
        else:
            steps.append(("content", os.fstat(fd).st_size))

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(("name", b.name)), replace(a, b)))
    files.write_atomically(tmp_path / "file", b"new")
    assert steps == [("content", 3), ("name", "file"), ("folder", ["file"])]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": 3, "id": "x"' + " " * 10])
def test_deep_or_broken_json(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UndeError, match="damaged"):
        Index.open(tmp_path)


def test_the_page_about_files_is_true():
    page = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    names = [e.name if "." in e.name else f"{e.name}/" for e in layout.ENTRIES]
    rows = [f"| `{n}` | {e.holds} | {e.writer} | {e.deleted} |" for n, e in zip(names, layout.ENTRIES)]
    head = ["| name | what it holds | who writes it | if it is deleted |", "|---|---|---|---|"]
    assert "\n".join([*head, *rows]) in page
    assert all(f"`{name}`" in page for name in ("ids-2.json", "probe-2.safetensors"))
