"""Files that others cut or overwrite between uses: an error, or right scores."""

import multiprocessing
import os

import pytest
import torch

import toy
from unde import Index, UndeError, methods
from unde.store.shards import FileWatch, ShardError, read_shard, reread_shard, write_shard

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


def score(folder, memory, ready, go, messages):
    """Score twice; exit with 0 if both are the same, 1 on an error, 3 if the second is wrong."""
    torch.set_num_threads(1)
    index = Index.open(folder, model=toy.net(), task=toy.Classification(), memory=memory)
    scores = index.score(QUERIES)
    first = scores.total()
    ready.set()
    go.wait(30)
    try:
        second = scores.total()
    except UndeError as e:
        messages.put(str(e))
        messages.close()
        messages.join_thread()
        os._exit(1)
    os._exit(0 if torch.equal(first, second) else 3)


def score_damaged(folder, name, damage, memory):
    """The exit code of a process that scores before and after a file is damaged, and its message."""
    index = toy.build(folder / "i", method=METHODS[name])
    index.score(QUERIES)
    ready, go, messages = FORK.Event(), FORK.Event(), FORK.Queue()
    child = FORK.Process(target=score, args=(index.folder, memory, ready, go, messages))
    child.start()
    assert ready.wait(30)
    [path] = index.folder.glob(FILES[name])
    damage(path)
    go.set()
    child.join(30)
    return child.exitcode, messages.get(timeout=5) if child.exitcode == 1 else ""


@pytest.mark.parametrize("memory", [STREAMED, KEPT])
@pytest.mark.parametrize("damage", [cut, zero])
@pytest.mark.parametrize("name", ["features", "K g(n)"])
def test_between_scores(tmp_path, name, damage, memory):
    code, message = score_damaged(tmp_path, name, damage, memory)
    assert code == 1
    assert "000001.safetensors is " in message
    assert "damaged" in message


@pytest.mark.parametrize("damage", [cut, zero])
def test_what_a_kernel_is_made_of_is_copied(tmp_path, damage):
    assert score_damaged(tmp_path, "moments", damage, KEPT) == (0, "")


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
    path, watch = tmp_path / "s.safetensors", FileWatch()
    write_shard(path, "me", {"x": torch.arange(9000.0)})
    watch.record([path])
    for _ in range(2):
        assert reread_shard(path, "me", watch)["x"][8999] == 8999
    path.touch()
    for _ in range(2):
        reread_shard(path, "me", watch)
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
