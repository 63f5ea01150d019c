"""`unde push` and `unde pull`: copies that equal what they are copies of, go on where they stopped, destroy nothing."""

import os
import shutil

import fsspec
import pytest
import torch
from commands import invoke as run
from remote_toy import content, objects

import toy
from unde import Index, UndeError, Weights
from unde.cli.app import Interrupted
from unde.evaluate import Bank
from unde.methods import TRAK
from unde.store import layout
from unde.store.remote import Remote
from unde.tasks import Classification

QUERIES = toy.data(3, seed=3)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """With all that may be in a folder."""
    made = toy.everything(tmp_path_factory.mktemp("built") / "i")
    made.score(QUERIES, TRAK(projection="kron(2)"))
    return made


@pytest.fixture
def index(built, tmp_path):
    return toy.copied(built, tmp_path / "i")


def everything(folder):
    """All files but the card, which a push writes anew."""
    logs = ("log.jsonl", "fisher/log.jsonl", "fisher-true/log.jsonl")
    return without_card(toy.content(folder) | {name: (folder / name).read_bytes() for name in logs})


def without_card(files):
    return {name: content for name, content in files.items() if name != layout.CARD}


@pytest.fixture
def writes(monkeypatch):
    """The names of all objects that were written, but for notes about who is at it."""
    names = []

    def noting(real):
        def written(self, *args):
            made = real(self, *args)
            names.extend([self.name] * (self.name not in (layout.LOCK, layout.CARD) and made is not False))
            return made

        return written

    for method in ("write_bytes", "upload", "create"):
        monkeypatch.setattr(Remote, method, noting(getattr(Remote, method)))
    return names


def test_there_and_back(tmp_path, s3, index, writes):
    want = everything(index.folder)
    assert {name.partition("/")[0] for name in want} == {e.name for e in layout.ENTRIES} - {
        layout.CHANGE,
        layout.LOCK,
        layout.SCRATCH,
        layout.CARD,
        layout.MATRICES,
        layout.CALIBRATION_HALVES,  # stay where they were trained
    }
    assert run("push", index.folder, s3).startswith(f"{s3}: {len(want)} files\n{s3 / layout.CARD}: ")
    assert without_card(objects(s3)) == want
    assert run("pull", s3, tmp_path / "new" / "j") == f"{tmp_path / 'new' / 'j'}: {len(want) + 1} files\n"
    assert everything(tmp_path / "new" / "j") == want
    writes.clear()
    assert f"{len(want)} of them were there already" in run("push", index.folder, s3)
    assert f"{len(want) + 1} of them were there already" in run("pull", s3, tmp_path / "new" / "j")
    assert writes == []
    opened = Index.open(s3, model=toy.net(), task=Classification(), train_data=toy.data(22))
    assert torch.equal(opened.score(QUERIES).total(), index.score(QUERIES).total())


def test_a_push_goes_on(s3, index, monkeypatch, writes):
    want, real = everything(index.folder), Remote.upload

    def dies(self, file):
        if self.name == "c00-000001.safetensors" and self.parent.parent.name != layout.FISHER:
            raise KeyboardInterrupt
        real(self, file)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "upload", dies)
        with pytest.raises(Interrupted, match="it goes on where it stopped"):
            run("push", index.folder, s3)
    with pytest.raises(UndeError, match="2 of 3 shards are missing"):
        Index.open(s3)
    before = list(writes)
    assert layout.MANIFEST in before
    writes.clear()
    assert f"{len(before)} of them were there already" in run("push", index.folder, s3)
    assert sorted(writes) == ["c00-000001.safetensors", "c00-000002.safetensors"]
    assert without_card(objects(s3)) == want


def test_a_pull_goes_on_and_mends(tmp_path, memory, index, monkeypatch):
    monkeypatch.setattr("unde.store.sync._HEAD", 400)  # the damage is behind it
    want = everything(index.folder)
    run("push", index.folder, memory / "i")
    run("pull", memory / "i", tmp_path / "j")
    shards = sorted((tmp_path / "j" / "shards").iterdir())
    shards[0].unlink()
    toy.flip(shards[1], -5)
    (tmp_path / "j" / "shards" / "c00-000000.safetensors.12ab.partial").write_bytes(b"half")
    assert f"{len(want) - 1} of them were there already" in run("pull", memory / "i", tmp_path / "j")
    assert {n: d for n, d in everything(tmp_path / "j").items() if not n.endswith(".partial")} == want


@pytest.mark.parametrize("way", ["push", "pull"])
def test_what_is_damaged_is_not_copied(tmp_path, memory, index, way):
    if way == "pull":
        run("push", index.folder, memory / "i")
    source, target = (index.folder, memory / "j") if way == "push" else (memory / "i", tmp_path / "j")
    shard = source / "shards" / "c00-000001.safetensors"
    toy.flip(shard, -5)
    with pytest.raises(
        UndeError, match=rf"{shard} is damaged: .*Run the same Index\.build again to repair it"
    ):
        run(way, source, target)
    assert not (target / "shards" / "c00-000001.safetensors").exists()
    assert not list((target / "shards").glob("*.partial"))


def test_an_upload_that_was_cut(memory, index, monkeypatch):
    monkeypatch.setattr(Remote, "upload", lambda self, file: self.write_bytes(file.read_bytes()[:100]))
    with pytest.raises(UndeError, match=r"has 100 of [\d,]+ bytes: run the same again"):
        run("push", index.folder, memory / "i")


def test_a_damaged_kernel_is_left_out(memory, index):
    file = next((index.folder / "kernels").glob("*/moments.safetensors"))
    file.write_bytes(file.read_bytes()[:-9])
    want = everything(index.folder)
    assert "made anew when it is needed" in run("push", index.folder, memory / "i")
    assert set(want) - set(objects(memory / "i")) == {str(file.relative_to(index.folder))}


@pytest.mark.parametrize("way", ["push", "pull"])
def test_a_place_that_holds_something_else(tmp_path, memory, way):
    here, there = toy.build(tmp_path / "i").folder, toy.build(memory / "i", model=toy.net(3)).folder
    source, target = (here, there) if way == "push" else (there, here)
    before, photos = toy.content(here), target.parent / "photos"
    photos.mkdir(exist_ok=True)
    (photos / "photo.png").write_bytes(b"mine")
    remote = content(memory / "i")
    with pytest.raises(UndeError, match=rf"{target} holds another index than {source}: choose another place"):
        run(way, source, target)
    with pytest.raises(UndeError, match=r"photos holds something else \(photo\.png\)"):
        run(way, source, photos)
    assert (toy.content(here), content(memory / "i")) == (before, remote)
    assert [p.name for p in photos.iterdir()] == ["photo.png"]


def test_only_what_is_known_is_copied(tmp_path, memory, index):
    secret, link = tmp_path / "secret", index.folder / layout.SOURCE
    secret.write_text("mine")
    link.unlink()
    want = everything(index.folder)
    os.symlink(secret, link)
    (index.folder / "model.pt").write_bytes(b"pickle")
    (index.folder / "shards" / "notes.txt").write_bytes(b"mine")
    said = run("push", index.folder, memory / "i")
    assert "left where it is, as not of the index: model.pt, shards/notes.txt" in said
    assert without_card(objects(memory / "i")) == want
    for name in ("evil.py", "shards/evil.so", "kernels/../../evil", "fisher/source.json"):
        fsspec.filesystem("memory").pipe_file(f"{memory}/i/{name}", b"evil")
    run("pull", memory / "i", tmp_path / "j")
    assert everything(tmp_path / "j") == want
    assert not list(tmp_path.rglob("evil*"))


def test_banks_and_weights(tmp_path, s3):
    bank = Bank.run(tmp_path / "b.npz", train=lambda i, s: 1.0, utility=lambda m: [m], n_train=8, subsets=3)
    Weights.uniform(["a", "b"]).save(tmp_path / "w.json")
    for name in ("b.npz", "w.json"):
        assert run("push", tmp_path / name, s3 / name) == f"{s3 / name}: 1 file\n"
        assert run("pull", s3 / name, tmp_path / "new" / name).endswith(": 1 file\n")
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / name).read_bytes()
        assert "1 of them were there already" in run("push", tmp_path / name, s3 / name)
    assert Bank.open(s3 / "b.npz").masks.tolist() == bank.masks.tolist()
    with pytest.raises(UndeError, match=r"w\.json holds something else: choose another place, or delete it"):
        run("push", tmp_path / "b.npz", s3 / "w.json")
    shutil.copy(tmp_path / "w.json", tmp_path / "x.json")
    (tmp_path / "x.json").write_text((tmp_path / "x.json").read_text().replace("1.0", "2.0", 1))
    with pytest.raises(UndeError, match="does not match its checksum"):
        run("push", tmp_path / "x.json", s3 / "x.json")
    assert set(objects(s3)) == {"b.npz", "w.json"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("push", "memory://a/b", "memory://a/c"), r"memory://a/b is a URL: expected unde push DIR URL"),
        (("pull", "here", "there"), r"here is no URL: expected unde pull URL DIR"),
        (("pull", "memory://a/b", "there"), r"there is nothing at memory://a/b"),
        (("push", ".", "memory://a/c"), r"\. holds no unde index: there is no manifest\.json"),
    ],
)
def test_what_cannot_be_copied(tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UndeError, match=told):
        run(*arguments)
    assert list(tmp_path.iterdir()) == []
