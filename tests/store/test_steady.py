"""Files that others cut or overwrite while they are used: an error, or right scores; never a dead process."""

import multiprocessing
import os
import time

import pytest
import torch

import toy
from unde import Index, UndeError, methods
from unde.scoring import group_scores
from unde.store.file_watch import Watch
from unde.store.shards import ShardError, read_again, read_shard, write_shard

pytestmark = pytest.mark.usefixtures("one_thread")

QUERIES = toy.data(4, seed=3)
STREAMED, KEPT = 16_000, 2**20  # bytes of memory
METHODS = {
    "features": methods.TracIn(projection="none"),
    "K g(n)": methods.TRAK(projection="none", damping=0.5),
    "moments": methods.EKFAC(projection="none"),
}
FILES = {
    "features": "shards/c00-000001.safetensors",
    "K g(n)": "kernels/*/000001.safetensors",
    "moments": "kernels/*/moments.safetensors",
}
FORK = multiprocessing.get_context("fork")


def cut(path):
    os.truncate(path, 0)


def zero(path):
    """The second half of what it holds, in place."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size - size // 2))


def score(folder, memory, during, ready, go, said):
    """Scores twice; exits with 0 if both are the same, 1 on an error, 3 if the second is wrong."""
    torch.set_num_threads(1)
    index = Index.open(folder, model=toy.net(), task=toy.Classification(), memory=memory)
    scores = index.score(QUERIES)
    first = scores.total()
    if during:
        real, met = group_scores._linear, []

        def slowly(scaled, queries, blocks, out):
            met.append(blocks[0].data_ptr())  # not the block itself, whose lease would go on
            if met[-1] != met[0] and not ready.is_set():  # the second block
                ready.set()
                time.sleep(0.4)  # it is being cut meanwhile
            return real(scaled, queries, blocks, out)

        group_scores._linear = slowly
        if not torch.equal(scores.total(), first):
            os._exit(3)
    else:
        ready.set()
    go.wait(30)
    try:
        again = scores.total()
    except UndeError as e:
        said.put(str(e))
        said.close()
        said.join_thread()
        os._exit(1)
    os._exit(0 if torch.equal(first, again) else 3)


def damaged(folder, name, damage, memory, during=False):
    """The exit code of a process that scores while a file is damaged, and what it said."""
    index = toy.build(folder / "i", method=METHODS[name])
    index.score(QUERIES)
    ready, go, said = FORK.Event(), FORK.Event(), FORK.Queue()
    child = FORK.Process(target=score, args=(index.folder, memory, during, ready, go, said))
    child.start()
    assert ready.wait(30)
    [path] = index.folder.glob(FILES[name])
    damage(path)
    go.set()
    child.join(30)
    return child.exitcode, said.get(timeout=5) if child.exitcode == 1 else ""


@pytest.mark.parametrize("memory", [STREAMED, KEPT])
@pytest.mark.parametrize("damage", [cut, zero])
@pytest.mark.parametrize("name", ["features", "K g(n)"])
def test_between_scores(tmp_path, name, damage, memory):
    code, said = damaged(tmp_path, name, damage, memory)
    assert code == 1
    assert "000001.safetensors is " in said
    assert "damaged" in said


@pytest.mark.parametrize("memory", [STREAMED, KEPT])
@pytest.mark.parametrize("name", ["features", "K g(n)"])
def test_in_the_middle_of_a_score(tmp_path, name, memory):
    """Who cuts the file waits for the block; the next that asks for it is told."""
    code, said = damaged(tmp_path, name, cut, memory, during=True)
    assert code == 1
    assert "000001.safetensors is truncated" in said


@pytest.mark.parametrize("damage", [cut, zero])
def test_what_a_kernel_is_made_of_is_copied(tmp_path, damage):
    assert damaged(tmp_path, "moments", damage, KEPT) == (0, "")


@pytest.mark.parametrize("damage", [cut, zero])
def test_between_opening_and_scoring(tmp_path, damage):
    index = toy.reopen(toy.build(tmp_path / "i"))
    damage(index.folder / FILES["features"])
    with pytest.raises(ShardError, match="damaged"):
        index.score(QUERIES).total()


@pytest.mark.parametrize("name", ["features", "moments"])
def test_query_features_are_no_file_any_more(tmp_path, name):
    index = toy.build(tmp_path / "i", method=METHODS[name])
    path = tmp_path / "q.safetensors"
    want = index.score(index.features(QUERIES, path)).total()
    loaded = toy.reopen(index).features(QUERIES, path)
    cut(path)
    assert torch.equal(index.score(loaded).total(), want)


def test_the_checksum_is_asked_again_only_of_what_changed(tmp_path, monkeypatch):
    asked, real = [], read_shard

    def counting(path, owner, verify=True, **options):
        asked.append(verify)
        return real(path, owner, verify, **options)

    monkeypatch.setattr("unde.store.shards.read_shard", counting)
    path, watch = tmp_path / "s.safetensors", Watch()
    write_shard(path, "me", {"x": torch.arange(9000.0)})
    watch.note([path])
    for _ in range(2):
        assert read_again(path, "me", watch)["x"][8999] == 8999
    path.touch()
    for _ in range(2):
        read_again(path, "me", watch)
    assert asked == [False, False, True, False]


def test_many_files_are_not_open_at_once(tmp_path):
    """Values of all shards are gathered without a file being held for each."""
    index = toy.build(tmp_path / "i", n=60, pass_size=1, shard_passes=1)
    before = len(os.listdir("/proc/self/fd"))
    real, most = torch.cat, []

    def cat(tensors, *rest):
        most.append(len(os.listdir("/proc/self/fd")))
        return real(tensors, *rest)

    torch.cat = cat
    try:
        toy.stored(index).values("loss")
    finally:
        torch.cat = real
    assert max(most) - before < 5
