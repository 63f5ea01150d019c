"""Changes of an index below a URL, by other processes, and of copies that are pushed and pulled."""

import pytest
import torch
from remote_toy import content, objects

import toy
from unde import Index, UndeError
from unde.methods import EKFAC, TRAK
from unde.parallel import Serial
from unde.parallel.base import JobRunner, pack_job
from unde.store import layout
from unde.store.sync import copy_index
from unde.tasks import Classification

QUERIES, ALL = toy.data(3, seed=3), toy.data(37)
METHOD = EKFAC(projection="kron(3)", fisher="sampled")


def part(start, stop):
    return tuple(column[start:stop] for column in ALL)


@pytest.fixture(autouse=True)
def one_day(monkeypatch):
    monkeypatch.setattr("unde.index.updates.today", lambda: "today")
    monkeypatch.setattr("unde.index.segments.today", lambda: "today")


def test_the_same_bytes_below_a_url(tmp_path, memory, cache_folder):
    made = []
    for home in (tmp_path, memory):
        index = toy.build(home / "i", train_data=part(0, 22), ids=list(range(22)), method=METHOD)
        index.append(part(22, 30), ids=range(22, 30), progress=False)
        gone = toy.stored(index).shard(0, 0)["features"][3].numpy().tobytes()
        index.remove([3])
        index.score(QUERIES)
        other = toy.build(home / "o", train_data=part(30, 37), ids=list(range(30, 37)), method=METHOD)
        Index.merge([index, other], home / "m")
        made.append(index)
    assert torch.equal(made[0].score(QUERIES).total(), made[1].score(QUERIES).total())
    for name in ("i", "m"):
        assert content(memory / name) == toy.content(tmp_path / name)
        assert Index.open(memory / name).verify()
    copies = b"".join(p.read_bytes() for p in cache_folder.rglob("*") if p.is_file())
    assert gone not in copies  # nor in what this machine has kept of it


def test_a_store_has_no_locks(memory):
    """A change that somebody else has begun there is not taken for dead."""
    index = toy.build(memory / "i", train_data=part(0, 22))
    noted = '{"what": "append 3", "token": "x", "on": "2030-01-01", "by": "17 on elsewhere"}'
    (memory / "i" / layout.CHANGE).write_bytes(noted.encode())
    before = objects(memory / "i")
    with pytest.raises(
        UndeError, match=r"append 3, begun 2030-01-01 by 17 on elsewhere\) is not finished.*delete"
    ):
        index.remove(indices=[0])
    assert objects(memory / "i") == before
    (memory / "i" / layout.CHANGE).unlink()
    index.remove(indices=[0])
    assert len(Index.open(memory / "i")) == 21


def test_pushed_and_pulled(tmp_path, memory):
    index = toy.build(tmp_path / "i", train_data=part(0, 22), ids=list(range(22)), method=METHOD)
    index.append(part(22, 37), ids=range(22, 37), progress=False)
    index.remove([1])
    index.score(QUERIES)
    index.features(QUERIES, index.folder / layout.QUERIES / "some.safetensors")
    (index.folder / layout.SHARDS / "c00-000099.safetensors").write_bytes(b"left by a change that was killed")
    copy_index(index.folder, memory / "i")
    copy_index(memory / "i", tmp_path / "back")
    back = Index.open(tmp_path / "back", model=toy.net(), task=Classification())
    assert back.verify()
    assert torch.equal(back.score(QUERIES).total(), index.score(QUERIES).total())
    assert not (tmp_path / "back" / layout.SHARDS / "c00-000099.safetensors").exists()


class Travelling(Serial):
    """Contexts go the way they go to other processes, jobs run here."""

    def run(self, function, context, jobs):
        for sent in map(JobRunner(), (pack_job(function, context), *jobs)):
            assert sent is None, sent
        yield from jobs


def test_other_processes(tmp_path):
    """The same bytes: their model comes by the recipe, the new examples travel."""
    made = []
    for name, who in (
        ("serial", {}),
        ("others", {"executor": Travelling(1, in_process=False), "recipe": "projects:make"}),
    ):
        index = toy.build(tmp_path / name, method=METHOD, threads=1, **who)
        index.append(toy.data(15, seed=8), progress=False)
        index.remove(indices=[5, 30])
        index.append(toy.data(3, seed=9), progress=False)
        made.append(index)
    assert toy.content(tmp_path / "others") == toy.content(tmp_path / "serial")
    assert torch.equal(made[1].score(QUERIES).total(), made[0].score(QUERIES).total())


def test_a_copy_of_before_is_another_index(tmp_path, memory):
    index = toy.build(tmp_path / "i", train_data=part(0, 22), method=TRAK(projection="kron(3)"))
    copy_index(index.folder, memory / "i")
    index.append(part(22, 30), progress=False)
    with pytest.raises(UndeError, match="holds another index"):
        copy_index(index.folder, memory / "i")
