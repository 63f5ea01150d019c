"""Data that is not the same each time it is read is refused, before, between and during builds."""

import json
from itertools import pairwise
from unittest import mock

import pytest
import torch

import toy
from unde import Index, UndeError, fingerprints
from unde.data import Rows
from unde.store.shards import write_shard
from unde.tasks import Classification


class Examples(torch.utils.data.Dataset):
    """A list of (x, y), with something that happens when example i is read for the nth time."""

    def __init__(self, n=22, seed=0):
        x, y = toy.data(n, seed)
        self.rows = list(zip(x, y))
        self.reads = [0] * n

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x, y = self.rows[i]  # the list says when it has ended
        self.reads[i] += 1
        self.on_read(i)
        return x, y

    def on_read(self, i):
        pass


class Interrupted(Exception):
    pass


def half_built(folder, train_data, shards, **options):
    """An index whose build stopped after some shards."""
    written = []

    def write(path, *rest):
        if len(written) == shards:
            raise Interrupted
        written.append(path)
        write_shard(path, *rest)

    with mock.patch("unde.index.shard_writer.write_shard", write), pytest.raises(Interrupted):
        toy.build(folder, train_data=train_data, **options)
    return written


@pytest.mark.parametrize("augmented", [range(22), [13]], ids=["all", "one"])
def test_random_augmentation_is_refused(tmp_path, augmented):
    class Augmented(Examples):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return (x + torch.randn(()) if i in augmented else x), y

    said = rf"example {augmented[0]} reads differently a second time.*augmentation"
    with pytest.raises(UndeError, match=said):
        toy.build(tmp_path / "i", train_data=Augmented())
    assert not (tmp_path / "i").exists()


class Drifting(Examples):
    """Example 12 has another content after it was read so many times."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return (x + 1 if i == 12 and self.reads[i] > self.times else x), y


def test_data_that_changes_after_the_first_look_is_refused(tmp_path, monkeypatch):
    """The same when it is looked at before the build and when it is built, another content after."""
    with pytest.raises(UndeError, match="example 12 reads differently"):
        toy.build(tmp_path / "i", train_data=Drifting(5))
    # Two examples are compared beforehand; the second checkpoint's pass sees that another has changed.
    monkeypatch.setattr(fingerprints, "SAMPLED", 2)
    with pytest.raises(UndeError, match="example 12 reads differ"):
        toy.build(tmp_path / "j", train_data=Drifting(5), checkpoints=toy.states(1, 2))


@pytest.mark.parametrize("sampled", [64, 2])
@pytest.mark.parametrize("changed", [0, 5, 9, 15])
def test_data_changed_between_runs_is_refused(tmp_path, changed, sampled):
    """Also where the changed example is not one of those that are sampled beforehand."""
    data = Examples()
    with mock.patch.object(fingerprints, "SAMPLED", sampled):
        assert len(half_built(tmp_path / "i", data, shards=2)) == 2
        x, y = data.rows[changed]
        data.rows[changed] = (x, (y + 1) % toy.CLASSES)
        said = "training data" if sampled == 64 or changed == 0 else f"example {changed} reads differently"
        with pytest.raises(UndeError, match=said):
            toy.build(tmp_path / "i", train_data=data)
        data.rows[changed] = (x, y)
        toy.build(tmp_path / "i", train_data=data)


def test_a_changed_example_that_was_not_read_yet_is_new_data(tmp_path):
    """Only the 64 sampled ones speak for what no shard holds: documented, and seen in the manifest."""
    data = Examples()
    with mock.patch.object(fingerprints, "SAMPLED", 2):
        half_built(tmp_path / "i", data, shards=2)
        data.rows[18] = (data.rows[18][0] * 2, data.rows[18][1])
        index = toy.build(tmp_path / "i", train_data=data)
    assert int(toy.stored(index).values("digest")[18]) == fingerprints.to_signed(Rows(data).digests([18])[0])


def test_another_length_between_runs_is_refused(tmp_path):
    data = Examples()
    half_built(tmp_path / "i", data, shards=1)
    data.rows.append(data.rows[0])
    data.reads.append(0)
    with pytest.raises(UndeError, match=r"length of the training data \(22 there, 23 given\)"):
        toy.build(tmp_path / "i", train_data=data)


class Shrinking(Examples):
    def on_read(self, i):
        if self.reads[5] == 5:  # the build itself, after the first looks
            del self.rows[20:]


class Growing(Examples):
    def on_read(self, i):
        if self.reads[21] == 4 and len(self.rows) == 22:
            self.rows.append(self.rows[0])


@pytest.mark.parametrize(("data", "now"), [(Shrinking, 20), (Growing, 23)])
def test_data_whose_length_changes_while_it_is_read_is_refused(tmp_path, data, now):
    with pytest.raises(UndeError, match=f"22 examples at first, now {now}"):
        toy.build(tmp_path / "i", train_data=data())


def test_index_errors_of_the_data_are_not_taken_for_a_change_of_length(tmp_path):
    """Each worker has its own copy of the data: what it reads ends, what we hold does not."""

    class Broken(Examples):
        def on_read(self, i):
            if self.reads[i] == 3:
                raise IndexError("no such label")

    for data, workers, said in ((Shrinking(), 1, ""), (Broken(), 0, "no such label")):
        with pytest.raises(IndexError, match=said):
            toy.build(tmp_path / "i", train_data=data, num_workers=workers)


def test_an_index_error_of_the_model_is_not_taken_for_a_change_of_length(tmp_path):
    """Token 9 is out of range; it is not among the examples that are tried first."""
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Flatten(), torch.nn.Linear(2, 2))
    x = torch.zeros(22, 1, dtype=torch.long)
    x[6] = 9
    with pytest.raises(UndeError, match=r"example 6 \(IndexError: index out of range"):
        toy.build(tmp_path / "i", train_data=(x, x[:, 0] * 0), model=model)


def test_looking_takes_bounded_time_and_spreads(tmp_path):
    order = list(fingerprints._spread(1000))
    assert sorted(order) == list(range(1000))
    first = sorted(order[:50])
    assert max(b - a for a, b in pairwise(first)) <= 55  # 20 on average; random: 90

    rows = Rows(Examples(200))
    seen = torch.tensor([fingerprints.to_signed(d) for d in rows.digests()])
    with mock.patch.object(fingerprints, "LOOK_SECONDS", 0.0):
        assert fingerprints.changed_example(rows, torch.arange(200), seen) is None
        assert sum(rows.data.reads) == 200 + fingerprints.SAMPLED + 1
    seen[77] += 1
    assert fingerprints.changed_example(rows, torch.arange(200), seen) == 77


def test_workers_read_the_same_index(tmp_path):
    a, b = toy.build(tmp_path / "a"), toy.build(tmp_path / "b", num_workers=2)
    assert toy.content(a.folder) == toy.content(b.folder)


def test_open_compares_the_data(tmp_path):
    index = toy.build(tmp_path / "i")
    x, y = toy.data(22)
    toy.reopen(index, train_data=(x, y))
    other = x.clone()
    other[17, 2] += 1e-6
    with pytest.raises(UndeError, match=r"training data \(example 17 has another content\)"):
        toy.reopen(index, train_data=(other, y))
    with pytest.raises(UndeError, match=r"length of the training data \(22 there, 21 given\)"):
        toy.reopen(index, train_data=(x[:21], y[:21]))


def test_ids(tmp_path):
    import numpy as np

    index = toy.build(tmp_path / "i", ids=[f"img{i}" for i in range(22)])
    top = index.score(toy.data(3, seed=9)).top(4)
    assert top.ids == [[f"img{i}" for i in row] for row in top.indices.tolist()]
    assert toy.reopen(index).ids == [f"img{i}" for i in range(22)]
    assert toy.build(tmp_path / "n", ids=np.arange(100, 122)).ids == list(range(100, 122))
    with pytest.raises(UndeError, match="21 ids for 22 examples"):
        toy.build(tmp_path / "j", ids=range(21))
    with pytest.raises(UndeError, match=r"strings or numbers, but one is \('a', 0\)"):
        toy.build(tmp_path / "j", ids=[("a", i) for i in range(22)])
    with pytest.raises(UndeError, match="What differs: the ids"):
        toy.build(tmp_path / "i", ids=[f"pic{i}" for i in range(22)])


def test_damaged_ids_are_found_and_repaired(tmp_path):
    ids = [f"img{i}" for i in range(22)]
    index = toy.build(tmp_path / "i", ids=ids)
    path = index.folder / "ids.json"
    whole = path.read_bytes()
    path.write_text(json.dumps(["other", *ids[1:]]))
    for _ in range(2):  # other ids, and none
        with pytest.raises(UndeError, match=r"ids.json is missing or damaged"):
            Index.open(index.folder, model=toy.net(), task=Classification())
        path.unlink(missing_ok=True)
    toy.build(tmp_path / "i", ids=ids)
    assert path.read_bytes() == whole
