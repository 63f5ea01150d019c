"""Changes that end in the middle: at every write and every deletion the index is what it was before or what it is
after, and the same change again brings it to its end."""

import shutil
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import toy
from unde import Index, UndeError
from unde.index import segments, updates
from unde.index import state as state_module
from unde.methods import EKFAC, TRAK
from unde.store import files, layout
from unde.store.locks import locked
from unde.tasks import Classification

QUERIES, ALL = toy.data(3, seed=3), toy.data(30)
SAMPLED = EKFAC(projection="kron(3)", fisher="sampled")


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


@contextmanager
def killed_at(number):
    """Ends at the moment with that number: before and after each file is written or deleted, and so kernels."""
    seen = 0

    def moment():
        nonlocal seen
        seen += 1
        if seen == number:
            raise Killed

    def moments(real: Callable[..., None]):
        def run(*args, **options):
            moment()
            real(*args, **options)
            moment()

        return run

    with (
        mock.patch.object(files, "write_atomically", moments(files.write_atomically)),
        mock.patch.object(updates, "delete", moments(updates.delete)),
        mock.patch.object(updates, "delete_folder", moments(updates.delete_folder)),
        mock.patch.object(updates, "today", return_value="today"),
        mock.patch.object(segments, "today", return_value="today"),
    ):
        try:
            yield
        except Killed:
            return
    assert seen < number


def opened(folder, data):
    return Index.open(folder, model=toy.net(), task=Classification(), train_data=data, verify=True)


def rows(start, stop):
    return tuple(column[start:stop] for column in ALL)


def append(folder):
    opened(folder, ALL).append(rows(21, 30), ids=range(21, 30), progress=False)


def remove(folder):
    opened(folder, ALL).remove([1, 20])


def merge(folder):
    Index.merge([folder.parent / "base", folder.parent / "more"], folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changes") / "base"
    index = toy.build(folder, train_data=rows(0, 21), ids=list(range(21)), method=SAMPLED)
    index.append(rows(21, 22), ids=[100], progress=False)  # of a change before
    index.remove([100])
    toy.build(folder.parent / "more", train_data=rows(21, 30), ids=list(range(21, 30)), method=SAMPLED)
    index.score(QUERIES)
    return folder


def names(folder):
    return {name for name in toy.content(folder) if not name.startswith("kernels")}


def state(folder):
    """The ids and features of an index that is opened and looked at to its last byte."""
    index = opened(folder, ALL)
    assert index.verify(), str(index.verify())
    stored, everyone = toy.stored(index), torch.arange(len(index))
    return list(index.ids), torch.cat(
        [stored.rows(everyone)[0], stored.fisher("sampled").rows(everyone)[0]], 1
    )


def at_every_moment(change, place, base=None):
    """Whether the change was finished when it was killed: at the first write or deletion, the second, and so on."""
    for moment in range(1, 200):
        shutil.rmtree(place, ignore_errors=True)
        if base is not None:
            shutil.copytree(base, place)
        finished = True
        with killed_at(moment):
            finished = False
            change(place)
            finished = True
        yield finished
        if finished:
            assert moment > 20
            return
    pytest.fail("never finished")


@pytest.mark.parametrize("change", [append, remove])
def test_before_or_after_and_on_to_its_end(base, change):
    """Opened again by somebody who knows nothing of it."""
    place = base.parent / "i"
    clean = shutil.copytree(base, base.parent / "clean", dirs_exist_ok=True)
    with killed_at(10**6):
        change(clean)
    before, after, whole, seen = state(base), state(clean), names(clean), set()
    for finished in at_every_moment(change, place, base):
        ids, features = state(place)
        assert torch.equal(features, before[1] if ids == before[0] else after[1])
        seen.add(tuple(ids))
        if not finished and unmade(place):
            change(place)
        ids, features = state(place)
        assert ids == after[0] and torch.equal(features, after[1])
        assert names(place) == whole
    assert len(seen) == 2
    assert torch.equal(opened(place, ALL).score(QUERIES).total(), opened(clean, ALL).score(QUERIES).total())


def unmade(folder):
    """Whether a change is still to be made, or to be brought to its end."""
    ids = Index.open(folder).ids
    return (folder / layout.CHANGE).exists() or (20 in ids and 21 not in ids)


def test_merges_go_on(base):
    place, clean = base.parent / "m", base.parent / "whole"
    with killed_at(10**6):
        merge(clean)
    want = Index.open(clean)
    for _ in at_every_moment(merge, place):
        if not (place / layout.MANIFEST).exists():
            with pytest.raises(UndeError, match="no unde index"):
                Index.open(place)
        with killed_at(10**6):
            merge(place)
        assert names(place) == names(clean)
        assert Index.open(place).manifest == want.manifest
    assert Index.open(place).verify()


def test_another_change_clears_what_was_begun(base):
    place = shutil.copytree(base, base.parent / "other", dirs_exist_ok=True)
    with killed_at(6):
        append(place)
    told = str(opened(place, ALL).verify())
    assert "append 9, begun today" in told and "the same again resumes it" in told
    opened(place, ALL).remove([5])
    assert not (place / layout.CHANGE).exists()
    fresh = shutil.copytree(base, base.parent / "fresh", dirs_exist_ok=True)
    opened(fresh, ALL).remove([5])
    assert names(place) == names(fresh)


def test_the_same_index_object_goes_on(base):
    """In a program that goes on after an error."""
    place = shutil.copytree(base, base.parent / "object", dirs_exist_ok=True)
    index = opened(place, ALL)
    for moment in (3, 9, 15, 21, 27, 33):
        with killed_at(moment):
            index.append(rows(21, 30), ids=range(21, 30), progress=False)
        index.append(rows(21, 30), ids=range(21, 30), progress=False) if len(index) == 21 else None
        assert len(index) == 30 and len(index.train_data) == 30
        assert torch.equal(index.train_data[25][0], ALL[0][25])
        index.remove(range(21, 30))
        assert len(index.train_data) == 21


def test_bad_examples_leave_nothing(base):
    place = shutil.copytree(base, base.parent / "bad", dirs_exist_ok=True)
    before, x = toy.content(place), ALL[0].clone()
    x[29] = float("nan")
    with pytest.raises(UndeError, match="gradient of example 29 is NaN"):
        opened(place, ALL).append((x[21:], ALL[1][21:]), ids=range(21, 30), progress=False)
    with pytest.raises(UndeError, match="cannot run on example 21"):
        opened(place, ALL).append((x[21:, :3], ALL[1][21:]), ids=range(21, 30), progress=False)
    with locked(place), pytest.raises(UndeError, match="another process is changing"):
        remove(place)
    assert toy.content(place) == before


def test_readers_see_what_they_opened_or_are_told(tmp_path):
    changed = r"has changed since it was opened \(appended 6 .*{}open it again"
    index = toy.build(tmp_path / "i", train_data=rows(0, 24), method=TRAK(projection="kron(3)"))
    reader, second = toy.reopen(index), toy.reopen(index)
    want = reader.score(QUERIES, "tracin").total()
    reader.score(QUERIES)
    index.append(rows(24, 30), progress=False)
    assert torch.equal(reader.score(QUERIES, "tracin").total(), want)  # of the shards that were there
    with pytest.raises(UndeError, match=changed.format("")):
        reader.score(QUERIES).total()  # K g(n) is gone
    index.remove(indices=[0])
    for stale in (reader, second):
        with pytest.raises(UndeError, match=changed.format("removed 1 .*")):
            stale.self_influence(method="tracin")
    with pytest.raises(UndeError, match=r"has changed since it was opened.*open it again"):
        second.append(rows(24, 30), progress=False)
    assert len(toy.reopen(index)) == 29


def test_opening_while_it_changes(tmp_path, monkeypatch):
    """The old manifest with the new shards: opening reads both again."""
    index = toy.build(tmp_path / "i", train_data=rows(0, 24))
    real, calls = state_module.check_shards, []

    def check(*args):
        calls.append(args)
        if len(calls) == 1:
            index.remove(indices=[0])
        real(*args)

    monkeypatch.setattr(state_module, "check_shards", check)
    assert len(Index.open(index.folder)) == 23 and len(calls) == 2


def test_a_mistake_leaves_what_was_begun(base):
    """A wrong id is no reason to forget a change that was killed."""
    place = shutil.copytree(base, base.parent / "mistake", dirs_exist_ok=True)
    with killed_at(8):
        append(place)
    before = toy.content(place)
    with pytest.raises(UndeError, match="not in the index"):
        opened(place, ALL).remove(["nobody"])
    assert toy.content(place) == before
