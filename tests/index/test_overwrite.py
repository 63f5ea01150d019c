"""Index.build(overwrite=True) replaces an index of other inputs, and resumes the same one."""

import json
import secrets

import pytest
import torch
from torch import nn

import toy
from unde import Index, UndeError
from unde.methods import EKFAC, TRAK, TracIn
from unde.store.layout import CALIBRATION, MANIFEST
from unde.store.remote import place

METHODS = {
    "tracin": TracIn(projection="none"),
    "whitened": EKFAC(projection="factored(1)"),
    "labels": EKFAC(projection="none", fisher="sampled"),
    "every label": TRAK(projection="none", fisher="true"),
}


def files(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def same(index, other):
    queries = toy.data(3, seed=9)
    assert torch.equal(index.score(queries).total(), other.score(queries).total())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_another_index_is_replaced_without_a_trace(tmp_path, method):
    old = toy.build(tmp_path / "i", method=method, ids=[f"x{i}" for i in range(22)])
    old.score(toy.data(3))  # writes kernels
    (tmp_path / "i" / CALIBRATION).write_text("{}")
    (tmp_path / "i" / "notes.txt").write_text("mine")
    options = {"model": toy.net(5), "train_data": toy.data(13, seed=4), "method": method}
    with pytest.raises(UndeError, match=r"already holds another index.*overwrite=True"):
        toy.build(tmp_path / "i", **options)
    fresh, replaced = (
        toy.build(tmp_path / "fresh", **options),
        toy.build(tmp_path / "i", overwrite=True, **options),
    )
    same(fresh, replaced)
    assert files(tmp_path / "i") == files(tmp_path / "fresh") | {"notes.txt"}
    (tmp_path / "i" / "notes.txt").unlink()
    assert replaced.verify() and replaced.ids is None


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_same_index_is_resumed(tmp_path, method):
    toy.build(tmp_path, method=method)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path) if "shards" in name}
    toy.build(tmp_path, method=method, overwrite=True)
    assert before == {name: (tmp_path / name).stat().st_mtime_ns for name in before} and before


def test_auto_is_chosen_anew_where_it_may_overwrite(tmp_path):
    toy.build(tmp_path, method="logra")
    assert toy.build(tmp_path, method="auto", overwrite=True).method.name == "trak"


class Halved(toy.Classification):
    """A task of a user whose loss changes without a new version."""

    factor = 1.0

    def loss(self, model, batch):
        return self.factor * super().loss(model, batch)


def test_a_changed_loss_of_ones_own_is_replaced(tmp_path, monkeypatch):
    toy.build(tmp_path, task=Halved())
    monkeypatch.setattr(Halved, "factor", 0.5)
    replaced = toy.build(tmp_path, task=Halved(), overwrite=True)
    monkeypatch.undo()
    assert replaced.verify()
    whole = toy.build(tmp_path / "whole", task=Halved())
    torch.testing.assert_close(4 * replaced.self_influence(), whole.self_influence())


def test_a_build_that_cannot_begin_leaves_the_old_index(tmp_path):
    old = toy.build(tmp_path)
    x, y = toy.data(22)
    for wrong in ({"train_data": (x, y + 99)}, {"batch_size": 0}, {"model": nn.Linear(4, 3)}):
        with pytest.raises(UndeError):
            toy.build(tmp_path, overwrite=True, **wrong)
    with pytest.raises(UndeError, match=r"array.*delete the shards of one another"):
        toy.build(tmp_path, overwrite=True, executor="array:1/2")
    assert old.verify()
    same(old, toy.reopen(old))


def test_an_index_of_another_release_is_replaced_and_no_other_manifest(tmp_path):
    toy.build(tmp_path)
    content = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(content | {"schema": 1}))
    with pytest.raises(UndeError, match=r"schema 1.*overwrite=True"):
        toy.build(tmp_path)
    toy.build(tmp_path, overwrite=True)
    Index.open(tmp_path)
    (tmp_path / MANIFEST).write_text('{"name": "of somebody else"}')
    with pytest.raises(UndeError, match="not the manifest of an unde index"):
        toy.build(tmp_path, overwrite=True)
    assert len(files(tmp_path)) > 1


def test_in_an_object_store(tmp_path):
    folder = place(f"memory://{secrets.token_hex(4)}/i")
    toy.build(folder, method=METHODS["labels"])
    options = {"model": toy.net(5), "method": METHODS["labels"]}
    replaced = toy.build(folder, overwrite=True, **options)
    assert replaced.verify()
    same(replaced, toy.build(tmp_path, **options))
