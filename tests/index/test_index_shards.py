"""Shards that are cut, flipped, missing or from elsewhere: open finds and names them, build repairs them."""

import json
import shutil
import weakref

import pytest

import toy
from unde import Index, UndeError
from unde.store.shards import ShardError, read_shard


@pytest.fixture
def index(tmp_path):
    return toy.build(tmp_path / "i")


def refuse_then_repair(index, *said, **options):
    """Open names what is wrong; the same build puts it right, to the byte."""
    with pytest.raises(ShardError) as e:
        toy.reopen(index)
    assert all(words in str(e.value) for words in (*said, "Run the same Index.build again"))
    toy.build(index.folder, **options)
    return toy.content(index.folder)


@pytest.mark.parametrize("size", [0, 5, 8, 100, 0.5, -1, None], ids=str)
def test_a_shard_of_another_length(index, size):
    whole, path = toy.content(index.folder), toy.shard_files(index)[1]
    full = path.read_bytes()
    path.write_bytes(full + b"\0" if size is None else full[: len(full) // 2 if size == 0.5 else size])
    assert refuse_then_repair(index, path.name, "damaged") == whole


@pytest.mark.parametrize("at", [40, -1, -300], ids=["header", "last byte", "middle"])
def test_a_flipped_bit(index, at, capsys):
    whole, path = toy.content(index.folder), toy.shard_files(index)[2]
    toy.flip(path, at, 2)
    assert refuse_then_repair(index, path.name) == whole
    assert f"{path.name} is" in capsys.readouterr().err  # build says which it computes again


def test_missing_swapped_and_damaged_shards_are_named(index):
    whole, paths = toy.content(index.folder), toy.shard_files(index)
    paths[0].unlink()
    paths[2].unlink()
    said = ("not finished", "2 of 3 shards are missing", paths[0].name, paths[2].name)
    assert refuse_then_repair(index, *said) == whole
    a, b, _ = paths
    kept = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(kept)
    assert refuse_then_repair(index, a.name, b.name, "is foreign") == whole
    whole, paths = toy.shard_files(index)[0], toy.shard_files(index)[1:]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardError) as e:
        toy.reopen(index)
    assert all(path.name in str(e.value) for path in paths) and whole.name not in str(e.value)


@pytest.mark.parametrize(
    "other",
    [{"model": toy.net(5)}, {"seed": 1}, {"pass_size": 2, "shard_passes": 4}, {"groups": "tensor"}],
    ids=["model", "seed", "batches", "groups"],
)
def test_a_shard_of_another_index_is_foreign(index, tmp_path, other):
    whole = toy.content(index.folder)
    stranger = toy.build(tmp_path / "other", **other)
    shutil.copy(toy.shard_files(stranger)[1], toy.shard_files(index)[1])
    assert refuse_then_repair(index, toy.shard_files(index)[1].name, "is foreign") == whole


def test_a_shard_of_another_checkpoint_is_foreign(tmp_path):
    states = toy.states(1, 2)
    index = toy.build(tmp_path / "i", checkpoints=states)
    whole, paths = toy.content(index.folder), toy.shard_files(index)
    shutil.copy(paths[3], paths[0])
    assert refuse_then_repair(index, paths[0].name, "is foreign", checkpoints=states) == whole


def test_only_what_is_damaged_is_computed_again(index):
    paths = toy.shard_files(index)
    before = [p.stat().st_mtime_ns for p in paths]
    paths[1].write_bytes(b"")
    toy.build(index.folder)
    after = [p.stat().st_mtime_ns for p in paths]
    assert [a == b for a, b in zip(before, after)] == [True, False, True]


def watch_reads(monkeypatch, where, tensor):
    """What is alive of the shards that were read before, at each read of another."""
    alive, counts = [], []

    def read(*args, **options):
        tensors = read_shard(*args, **options)
        counts.append(sum(r() is not None for r in alive))
        alive.append(weakref.ref(tensors[tensor]))
        return tensors

    monkeypatch.setattr(f"unde.{where}.read_shard", read)
    return counts


def test_opening_holds_one_shard_at_a_time(tmp_path, monkeypatch):
    """The tensors of a shard are gone before the next shard is read."""
    index = toy.build(tmp_path / "i", 80)
    counts = watch_reads(monkeypatch, "index.reader", "features")
    toy.reopen(index)
    assert counts == [0] * 20  # its sizes, and then its content


def test_values_of_all_examples_keep_no_file_mapped(tmp_path, monkeypatch):
    """Of what is read from a shard a copy is kept, and not a view, with which the whole file would stay in memory."""
    index = toy.build(tmp_path / "i", 80)
    counts = watch_reads(monkeypatch, "store.shards", "digest")
    found = toy.stored(index).values("digest")
    assert len(found) == 80 and len(found.unique()) == 80
    assert len(counts) == 10 and max(counts) <= 1


def test_a_damaged_manifest(index):
    whole, path = toy.content(index.folder), index.folder / "manifest.json"
    text = path.read_text()
    for broken in (text[:-20], text.replace('"seed": 0', '"seed": 1'), text.replace('"seed"', '"sead"'), ""):
        path.write_text(broken)
        for use in (lambda: Index.open(index.folder), lambda: toy.build(index.folder)):
            with pytest.raises(UndeError, match=r"manifest.json is damaged .*delete this file"):
                use()
        path.unlink()
        before = [p.stat().st_mtime_ns for p in toy.shard_files(index)]
        toy.build(index.folder)
        assert toy.content(index.folder) == whole
        assert [p.stat().st_mtime_ns for p in toy.shard_files(index)] == before  # none was computed again


def test_passes_are_those_that_were_settled_also_when_resumed(tmp_path):
    """Passes of another size round differently: a resumed build runs the very same ones, whatever its budget."""
    seen = []

    def runs():
        tries = [1, 2, 3]  # that are tried first, to settle
        out = [n for n in seen if n not in tries]
        seen.clear()
        return out

    options = {"n": 24, "task": toy.Watched(lambda batch: seen.append(len(batch[0])))}
    index = toy.build(tmp_path / "i", **options, pass_size=5)
    assert runs() == [5, 5, 5, 5, 4]
    toy.shard_files(index)[1].unlink()
    toy.build(tmp_path / "i", **options, pass_size=4, memory="3kB")
    assert runs() == [5, 5]
    assert toy.build(tmp_path / "j", 24, pass_size=5, memory="3kB").manifest.resolved.pass_size < 5


def test_the_shards_hold_no_time_and_no_place(tmp_path):
    """Built twice, in other folders and at other times: the same bytes; the log is apart."""
    a, b = toy.build(tmp_path / "a"), toy.build(tmp_path / "elsewhere" / "b")
    assert toy.content(a.folder) == toy.content(b.folder)
    assert len((a.folder / "log.jsonl").read_text().splitlines()) == 1
    assert json.loads((a.folder / "log.jsonl").read_text())["examples"] == 22
    toy.build(tmp_path / "a")
    assert len((a.folder / "log.jsonl").read_text().splitlines()) == 1  # nothing was done
