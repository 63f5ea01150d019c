"""An index, a bank and weights below memory://: what they are in a folder, byte for byte."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from remote_toy import content, objects

import toy
from unde import Index, UndeError, Weights
from unde.cli.store import verify_path
from unde.evaluate import Bank
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.store import layout
from unde.store.remote import Remote, Unreachable, place
from unde.tasks import Classification

QUERIES = toy.data(3, seed=3)
METHODS = {
    "tracin": TracIn(projection="none"),
    "trak": TRAK(projection="kron(3)"),
    "logra": LoGRA(projection="kron(2)"),
    "whitened": EKFAC(projection="factored(2)"),
    "ekfac": EKFAC(projection="kron(3)", fisher="sampled"),
}


def train(indices: np.ndarray, seed: int) -> float:
    return float(indices.mean()) + seed % 7


def utility(model: float) -> np.ndarray:
    return np.array([model, -model])


@pytest.mark.parametrize(
    ("remote", "method"), [*(("memory", name) for name in METHODS), ("s3", "ekfac")], indirect=["remote"]
)
def test_the_same_bytes_as_in_a_folder(tmp_path, remote, method):
    memory, options = remote, {"method": METHODS[method], "ids": [f"#{i}" for i in range(22)]}
    here, there = toy.build(tmp_path / "i", **options), toy.build(str(memory / "i"), **options)
    want = here.score(QUERIES)
    assert torch.equal(there.score(QUERIES).total(), want.total())
    here.features(QUERIES, tmp_path / "i" / "queries" / "some.safetensors")
    there.features(QUERIES, f"{memory}/i/queries/some.safetensors")
    assert content(memory / "i") == toy.content(tmp_path / "i")
    assert not [name for name in objects(memory / "i") if name.endswith(layout.LOCK)]
    opened = Index.open(f"{memory}/i/", model=toy.net(), task=Classification(), train_data=toy.data(22))
    assert torch.equal(opened.score(QUERIES).top(3).values, want.top(3).values)
    assert opened.ids == here.ids
    assert opened.folder == memory / "i"


def test_weights_are_learned_saved_and_read(tmp_path, remote):
    here, there = toy.build(tmp_path / "i", 220), toy.build(remote / "i", 220)
    want, weights = here.learn_weights(examples=20), there.learn_weights(examples=20)
    assert torch.equal(weights.values, want.values)
    weights.save(f"{remote}/w.json")
    want.save(tmp_path / "w.json")
    assert (remote / "w.json").read_bytes() == (tmp_path / "w.json").read_bytes()
    assert torch.equal(Weights.load(f"{remote}/w.json").values, want.values)
    with pytest.raises(UndeError, match=r"no weights file at '.*://.*other\.json'"):
        Weights.load(f"{remote}/other.json")


@pytest.mark.parametrize(
    ("remote", "damage"),
    [*(("memory", damage) for damage in ("lost", "cut", "foreign", "flipped")), ("s3", "cut")],
    indirect=["remote"],
)
def test_a_build_goes_on(tmp_path, remote, damage, capsys):
    whole, index = toy.content(toy.build(tmp_path / "i").folder), toy.build(remote / "i")
    shard = index.folder / "shards" / "c00-000001.safetensors"
    said = r"1 of 3 shards are missing" if damage == "lost" else rf"shard {shard} is .*(damaged|foreign)"
    if damage == "lost":
        shard.unlink()
    elif damage == "flipped":
        toy.flip(shard, -5)
    else:
        found = shard.read_bytes()
        shard.write_bytes(found[:-9] if damage == "cut" else whole["shards/c00-000000.safetensors"])
    with pytest.raises(UndeError, match=rf"{said}.*Run the same Index\.build again"):
        Index.open(remote / "i")
    toy.build(remote / "i")
    assert content(remote / "i") == whole
    assert damage == "lost" or f"{shard} is" in capsys.readouterr().err.replace("\n", "")
    assert len(Index.open(remote / "i")) == 22
    assert torch.equal(toy.reopen(index).score(QUERIES).total(), index.score(QUERIES).total())


def test_another_index_and_other_things_are_refused(memory):
    toy.build(memory / "i")
    with pytest.raises(UndeError, match=r"memory://.*/i already holds another index.*weights"):
        toy.build(memory / "i", model=toy.net(3))
    (memory / "j" / "photo.png").write_bytes(b"mine")
    with pytest.raises(UndeError, match=r"holds something else \(photo\.png\)"):
        toy.build(memory / "j")
    with pytest.raises(UndeError, match=r"photo\.png is a file"):
        toy.build(memory / "j" / "photo.png")
    with pytest.raises(UndeError, match=r"memory://.*/k holds no unde index"):
        Index.open(memory / "k")
    assert objects(memory / "j") == {"photo.png": b"mine"}


def test_a_damaged_manifest(tmp_path, memory):
    path = toy.build(memory / "i").folder / layout.MANIFEST
    whole = toy.content(toy.build(tmp_path / "i").folder)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UndeError, match=r"manifest\.json is damaged .*delete this file"):
        Index.open(memory / "i")
    path.unlink()
    toy.build(memory / "i")
    assert content(memory / "i") == whole


def test_whoever_begins_first_has_settled_it(tmp_path, memory, monkeypatch):
    """Another coordinator, with other pass sizes, begins the same index while this one settles it."""
    options = {"method": EKFAC(projection="factored(2)"), "ids": list(range(22))}
    whole = toy.content(toy.build(tmp_path / "i", pass_size=2, **options).folder)
    real, began = Remote.create, []

    def create(self, data):
        if self.name == layout.MATRICES and not began:
            began.append(self)
            toy.build(memory / "i", pass_size=2, **options)
        return real(self, data)

    monkeypatch.setattr(Remote, "create", create)
    index = toy.build(memory / "i", **options)
    assert began
    assert index.manifest.resolved.pass_size == 2
    assert content(memory / "i") == whole


def test_who_asked_for_another_index_is_refused_when_it_comes_second(memory, monkeypatch):
    real, began = Remote.create, []

    def create(self, data):
        if self.name == layout.MANIFEST and not began:
            began.append(self)
            toy.build(memory / "i", model=toy.net(3))
        return real(self, data)

    monkeypatch.setattr(Remote, "create", create)
    with pytest.raises(UndeError, match=r"already holds another index.*the model's weights"):
        toy.build(memory / "i")
    assert len(Index.open(memory / "i", model=toy.net(3), task=Classification())) == 22


def test_partial_results_that_another_has_cleared(tmp_path, memory, monkeypatch):
    """Two fit the same kernel; the first to finish clears what the other was about to merge."""
    monkeypatch.setattr("unde.kernels.base.JOINED", 1)
    method = TRAK(projection="kron(3)")
    want = toy.build(tmp_path / "i", method=method).score(QUERIES).total()
    index, real, cleared = toy.build(memory / "i", method=method), Remote.write_bytes, []

    def write_bytes(self, data):
        real(self, data)
        if self.name.endswith("-000002.safetensors") and "/kernels/" in self.url and not cleared:
            cleared.append(self)
            toy.reopen(index).score(QUERIES)
            monkeypatch.setenv("UNDE_CACHE", str(tmp_path / "cache of another machine"))

    monkeypatch.setattr(Remote, "write_bytes", write_bytes)
    assert torch.equal(index.score(QUERIES).total(), want)
    assert cleared
    assert not cleared[0].exists()


def test_a_store_that_may_not_be_written_can_be_asked(memory, monkeypatch, capsys):
    method = TRAK(projection="kron(3)")
    index = toy.build(memory / "i", method=method)
    want = index.score(QUERIES).total()
    for name in [n for n in objects(memory / "i") if n.startswith("kernels/")]:
        (memory / "i" / name).unlink()

    def denied(fs, *args, **kwargs):
        raise PermissionError("Forbidden")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", denied)
    again = toy.reopen(index)
    assert torch.equal(again.score(QUERIES).total(), want)
    assert "access is denied" in capsys.readouterr().err
    with pytest.raises(
        UndeError, match=r"cannot write memory://.*/j/\.lock, access is denied .*check the credentials"
    ):
        toy.build(memory / "j")


def test_a_bank(tmp_path, remote):
    options = {"train": train, "utility": utility, "n_train": 12, "subsets": 5}
    here, there = (Bank.run(p, **options) for p in (tmp_path / "b.npz", f"{remote}/b.npz"))
    assert np.array_equal(there.utility["queries"], here.utility["queries"])
    assert np.array_equal(Bank.open(remote / "b.npz").masks, here.masks)
    assert set(objects(remote)) == {"b.npz"}
    with pytest.raises(UndeError, match=r"b\.npz belongs to a bank with another plan: subsets"):
        Bank.run(f"{remote}/b.npz", **(options | {"subsets": 6}))
    with pytest.raises(UndeError, match=r"there is no bank at \w+://"):
        Bank.open(remote / "c.npz")


def test_a_bank_goes_on(tmp_path, memory):
    trained = []

    def once(indices, seed):
        trained.append(seed)
        if len(trained) == 3:
            raise RuntimeError("power cut")
        return train(indices, seed)

    options = {"train": once, "utility": utility, "n_train": 12, "subsets": 5}
    with pytest.raises(UndeError, match=r"(?s)power cut.*2 of 5 models are kept in memory://.*b\.npz\.parts"):
        Bank.run(memory / "b.npz", **options)
    with pytest.raises(UndeError, match=r"not finished \(2 of 5 models\)"):
        Bank.open(memory / "b.npz")
    bank = Bank.run(memory / "b.npz", **options)
    assert len(trained) == 6
    want = Bank.run(tmp_path / "b.npz", **(options | {"train": train}))
    assert np.array_equal(bank.utility["queries"], want.utility["queries"])
    assert set(objects(memory)) == {"b.npz"}


def test_a_bank_that_another_run_has_finished_and_cleared(memory, monkeypatch):
    options = {"train": train, "utility": utility, "n_train": 12, "subsets": 3}
    real, began = Remote.create, []

    def create(self, data):
        made = real(self, data)
        if self.name == "plan.json" and not began:
            began.append(self)
            Bank.run(memory / "b.npz", **options)
        return made

    monkeypatch.setattr(Remote, "create", create)
    assert Bank.run(memory / "b.npz", **options).utility["queries"].shape == (3, 2)
    assert began
    assert set(objects(memory)) == {"b.npz"}


def test_a_bank_that_another_run_has_finished_meanwhile(memory):
    def slow(indices, seed):
        if not (memory / "b.npz").exists():
            Bank.run(memory / "b.npz", **options)
        return train(indices, seed)

    options = {"train": train, "utility": utility, "n_train": 12, "subsets": 3, "name": "the same"}
    bank = Bank.run(memory / "b.npz", **(options | {"train": slow}))
    assert bank.utility["queries"].shape == (3, 2)


def test_places_and_drivers_that_are_not_there(monkeypatch):
    assert place("memory://a//b/") == place("MEMORY://a/b") == Remote("memory://a/b")
    assert pickle.loads(pickle.dumps(Remote("s3://b/i"))) == Remote("s3://b/i")
    assert str(place("file:///tmp/x")) == "/tmp/x"
    x = Remote("s3://b/i/x.npz")
    assert (x.with_suffix(".y"), Remote("s3://b/i").parent.name) == (Remote("s3://b/i/x.y"), "b")
    for odd in ("s3://", "s3://b/../c", "zip://x::s3://b/y.zip"):
        with pytest.raises(UndeError, match="cannot read the URL"):
            place(odd)
    with pytest.raises(UndeError, match=r"s3:/b/i was a URL.*give it as a str"):
        Index.open(Path("s3://b/i"))
    with pytest.raises(UndeError, match=r"no store is known by nowhere://"):
        Index.open("nowhere://b/i")
    registry = sys.modules["fsspec.registry"]
    monkeypatch.setitem(registry.known_implementations, "s3a", {"class": "no_s3fs.X", "err": "Install s3fs"})
    with pytest.raises(UndeError, match=r"s3a:// needs a driver .*Install s3fs.*: install unde\[s3\]"):
        Index.open("s3a://b/i")


def test_verify_in_a_store(memory):
    toy.build(memory / "i", ids=[f"#{i}" for i in range(22)], method=METHODS["logra"]).score(QUERIES)
    Index.open(memory / "i").close()
    found = Index.open(memory / "i").verify()
    assert found and not found.unfinished and found.files > 5, found
    (memory / "i" / "scratch" / "x" / "left.safetensors").write_bytes(b"half")
    [kernel] = (memory / "i" / "kernels").iterdir()
    assert verify_path(memory / "i"), verify_path(memory / "i")
    (memory / "i" / "stray.txt").write_bytes(b"?")
    (kernel / "before-1.safetensors").write_bytes(b"??")
    shard = memory / "i" / "shards" / "c00-000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5] + b"\0\1\0\1\0")
    told = verify_path(memory / "i")
    kinds = {(p.name, p.kind) for p in told.problems}
    assert kinds == {
        ("stray.txt", "foreign"),
        (f"kernels/{kernel.name}/before-1.safetensors", "damaged"),
        ("shards/c00-000001.safetensors", "damaged"),
    }, told
    shard.unlink()
    assert "1 of 3 shards are missing" in verify_path(memory / "i").unfinished


def test_verify_of_a_bank_and_weights_in_a_store(memory):
    Bank.run(memory / "bank.npz", train=train, utility=utility, n_train=20, subsets=2, seed=1)
    Weights.uniform(["a", "b"]).save(memory / "w.json")
    for name, what in (("bank.npz", "bank"), ("w.json", "weights")):
        path = memory / name
        assert verify_path(path) and verify_path(path).what == what
        path.write_bytes(path.read_bytes()[:-20] + b"x" * 20)
        assert not verify_path(path)


def test_a_store_that_does_not_answer_is_not_damaged(memory, monkeypatch):
    toy.build(memory / "i")
    Weights.uniform(["a", "b"]).save(memory / "w.json")

    read = Remote.read_bytes

    def silent(self, first=None):
        if first is None:
            raise Unreachable(5, f"cannot read {self}")
        return read(self, first)

    monkeypatch.setattr(Remote, "read_bytes", silent)
    for name in ("i", "w.json"):
        with pytest.raises(Unreachable, match="cannot read"):
            verify_path(memory / name)
