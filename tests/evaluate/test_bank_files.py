"""The files of a bank: what is damaged, left over, foreign or old, and disks that are full."""

import errno
import io
import json
import os
import shutil
import threading
import tracemalloc
import zipfile
from pathlib import Path

import bank_jobs
import numpy as np
import pytest
from bank_jobs import assert_same, run

from refusals import refused
from unde.errors import UndeError
from unde.evaluate import Bank
from unde.evaluate.bank import bank_io as files

MODELS = 2 * bank_jobs.SUBSETS
ROOT = Path(__file__).parents[2]


def begin(path, models, **changes):
    """A run that fails after so many models; its folder of parts."""
    left = iter(range(models))

    def train(indices, seed):
        next(left)
        return bank_jobs.train(indices, seed)

    refused("StopIteration", run, path, train=train, **changes)
    return path.with_name(path.name + ".parts")


def counting(trained):
    def train(indices, seed):
        trained.append(seed)
        return bank_jobs.train(indices, seed)

    return train


def test_torn_parts_and_leftovers_are_made_anew(tmp_path, reference):
    path, parts = tmp_path / "bank", begin(tmp_path / "bank", 6)
    torn, flipped = parts / "model-00001.safetensors", parts / "model-00002.safetensors"
    torn.write_bytes(torn.read_bytes()[:-40])
    content = bytearray(flipped.read_bytes())
    content[-3] ^= 0xFF
    flipped.write_bytes(content)
    for leftover in ("plan.json.partial", "model-00003.safetensors.0a1b.partial"):
        (parts / leftover).write_bytes(b"half")
    (tmp_path / "bank.0a1b2c3d.partial").write_bytes(b"half")
    (tmp_path / "bank.other.0a1b2c3d.partial").write_bytes(b"somebody else's")
    assert_same(run(path), reference)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bank", "bank.other.0a1b2c3d.partial"]


def test_two_runs_at_once_are_refused(tmp_path):
    def train(indices, seed):
        refused("another process is filling", run, tmp_path / "bank", subsets=1)
        return bank_jobs.train(indices, seed)

    run(tmp_path / "bank", train=train, subsets=1)


def test_foreign_files_are_neither_read_nor_overwritten(tmp_path):
    (tmp_path / "bank.parts").mkdir()
    (tmp_path / "bank.parts" / "thesis.tex").write_text("years of work")
    refused(r"holds something else than a bank \(thesis.tex\)", run, tmp_path / "bank")
    for name, content in (("text", b"hello"), ("npy", b"\x93NUMPY\x01\x00"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        refused("not a bank", run, tmp_path / name)
        assert (tmp_path / name).read_bytes() == content


def test_other_formats_and_pickles_are_not_opened(tmp_path, reference):
    arrays = arrays_of(reference)
    np.savez(tmp_path / "new.npz", **with_provenance(arrays, format="unde bank 99"))
    refused("unde bank 99", Bank.open, tmp_path / "new.npz")
    np.savez(tmp_path / "evil.npz", **{**arrays, "seeds": np.array([object()])})
    refused("not a bank that can be read", Bank.open, tmp_path / "evil.npz")


def test_leftover_parts_go_if_they_are_of_this_bank_and_stay_if_not(tmp_path):
    bank = run(tmp_path / "bank", subsets=1)
    for plan, stays in ((bank.provenance["plan"], False), ({**bank.provenance["plan"], "seed": 9}, True)):
        parts = tmp_path / "bank.parts"
        parts.mkdir()
        (parts / "plan.json").write_text(json.dumps({"format": "unde bank 2", "plan": plan}))
        (parts / "model-00000.safetensors").write_bytes(b"")
        run(tmp_path / "bank", subsets=1)
        assert parts.exists() == stays


def test_parts_that_were_swapped_or_are_of_another_plan_are_made_anew(tmp_path, reference):
    parts, others = begin(tmp_path / "bank", 6), begin(tmp_path / "other", 1, seed=3)
    shutil.copy(others / "model-00000.safetensors", parts / "model-00000.safetensors")
    one, two = parts / "model-00001.safetensors", parts / "model-00002.safetensors"
    one.rename(tmp_path / "held")
    two.rename(one)
    (tmp_path / "held").rename(two)
    trained = []
    assert_same(run(tmp_path / "bank", train=counting(trained)), reference)
    assert trained == reference.seeds.ravel()[[0, 1, 2, *range(6, MODELS)]].tolist()


def test_a_plan_that_was_deleted_is_written_again(tmp_path, reference):
    parts, trained = begin(tmp_path / "bank", 6), []
    (parts / "plan.json").write_text('{"format": "unde bank 2", "plan": {"n_train": -5}}')
    for call in (lambda: run(tmp_path / "bank"), lambda: Bank.open(tmp_path / "bank")):
        refused(r"plan\.json is not the plan of a bank.*delete this file", call)
    (parts / "plan.json").unlink()
    assert_same(run(tmp_path / "bank", train=counting(trained)), reference)
    assert len(trained) == MODELS - 6


def test_a_plan_that_another_run_wrote_meanwhile_is_not_foreign(tmp_path, reference, monkeypatch):
    parts = begin(tmp_path / "bank", 6)
    answers, exists = [], files.exists

    def looked(place):
        answers.append(place.name == "plan.json" and bool(answers) and exists(place))
        return answers[-1]

    monkeypatch.setattr(files, "exists", looked)  # it was not there when this run looked first
    assert_same(run(tmp_path / "bank"), reference)
    assert answers[:2] == [False, True] and not parts.exists()


def test_of_three_runs_at_once_one_fills_the_bank_and_nothing_is_left(tmp_path, reference):
    start, ended = threading.Barrier(3), []

    def one():
        start.wait()
        try:
            ended.append(run(tmp_path / "bank", train=lambda i, seed: bank_jobs.train(i, seed, pause=0.01)))
        except UndeError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turned_away = [e for e in ended if isinstance(e, str)]  # those that came while it was not finished
    assert len(turned_away) < len(ended) == 3
    assert all("another process is filling" in e for e in turned_away)
    assert_same(Bank.open(tmp_path / "bank"), reference)
    assert os.listdir(tmp_path) == ["bank"]


def arrays_of(bank):
    """As a release before 0.2 wrote them, without a checksum."""
    arrays = dict(np.load(bank.path))
    del arrays["checksum"]
    return with_provenance(arrays, format="unde bank 1")


def with_provenance(arrays, **changes):
    provenance = json.loads(str(arrays["provenance"])) | changes
    return {**arrays, "provenance": np.array(json.dumps(provenance))}


def with_plan(arrays, **changes):
    return with_provenance(arrays, plan=json.loads(str(arrays["provenance"]))["plan"] | changes)


def with_nan(arrays):
    values = arrays["utility/near"].copy()
    values[1, 1, 1] = np.nan
    return {**arrays, "utility/near": values}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_nan, "utilities of 'near' are not all finite"),
        (
            lambda a: a | {"utility/near": a["utility/near"][:-1]},
            r"shape \(9, 2, 5\), expected \(10, 2, 'Q'\)",
        ),
        (lambda a: a | {"utility/near": a["utility/near"].astype(str)}, "not all finite numbers"),
        (lambda a: {k: v for k, v in a.items() if not k.startswith("utility")}, "no utilities"),
        (lambda a: a | {"masks": a["masks"][:-1]}, r"masks have shape \(9, 4\), expected \(10, 4\)"),
        (lambda a: a | {"masks": a["masks"] | 128}, "not all of its subsets have 15 examples"),
        (lambda a: a | {"seeds": a["seeds"][::-1]}, "seeds are not those of its plan"),
        (lambda a: a | {"seconds": -a["seconds"]}, "one duration for each"),
        (lambda a: with_plan(a, n_train=-5), "n_train is -5"),
        (lambda a: with_plan(a, n_train="30"), "n_train is '30'"),
        (lambda a: with_plan(a, subsets=10**15), "seeds are not those"),
        (lambda a: with_plan(a, alpha=float("nan")), "alpha is nan"),
        (lambda a: with_provenance(a, plan=[]), "a plan is a list"),
        (lambda a: with_provenance(a, format="unde bank 2"), "does not match its checksum"),
        (lambda a: {k: v for k, v in a.items() if k != "seconds"}, "seconds"),
    ],
)
def test_a_bank_that_contradicts_its_plan_is_refused(tmp_path, reference, change, message):
    arrays = arrays_of(reference)
    np.savez_compressed(tmp_path / "sound.npz", **arrays)
    assert_same(Bank.open(tmp_path / "sound.npz"), reference)
    np.savez_compressed(tmp_path / "bad.npz", **change(arrays))
    refused(rf"bad.npz is not a bank.*{message}.*make it anew", Bank.open, tmp_path / "bad.npz")


def test_any_damaged_byte_is_noticed_or_harmless(tmp_path, reference):
    content, path = reference.path.read_bytes(), tmp_path / "bank.npz"
    noticed = 0
    for at in range(0, len(content), 13):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        try:
            assert_same(Bank.open(path), reference)
        except UndeError:
            noticed += 1
    assert noticed > len(content) / 13 / 2
    for length in range(0, len(content), 197):
        path.write_bytes(content[:length])
        refused("not a bank that can be read", Bank.open, path)


def test_another_checksum_than_that_of_the_zip_is_needed(tmp_path, reference):
    arrays = dict(np.load(reference.path))
    arrays["utility/near"] = arrays["utility/near"] + 1
    np.savez(tmp_path / "bank.npz", **arrays)
    refused("does not match its checksum", Bank.open, tmp_path / "bank.npz")


@pytest.mark.parametrize("lie", [False, True], ids=["bomb", "header"])
def test_a_small_file_that_would_fill_the_memory_is_refused_unread(tmp_path, reference, lie):
    path, size = tmp_path / "bank.npz", 10**12 if lie else 2**27
    np.savez_compressed(path, **arrays_of(reference))
    header = io.BytesIO()
    shape = {"descr": "<f8", "fortran_order": False, "shape": (10, 2, size // 160)}
    np.lib.format.write_array_header_1_0(header, shape)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file, file.open("utility/x.npy", "w") as entry:
        entry.write(header.getvalue())
        for _ in range(0 if lie else size // 2**20):
            entry.write(bytes(2**20))
    assert path.stat().st_size < 2**18
    tracemalloc.start()
    refused("shorter or longer than its shape" if lie else "would take .* in memory", Bank.open, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments" / "banks").glob("*.npz")), ids=lambda path: path.stem
)
def test_banks_of_the_experiments_open(path):
    assert len(Bank.open(path).masks) >= 16


def test_paths_that_cannot_be_a_bank_are_told(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for call in (Bank.open, run):
        refused(r"cannot read .*folder \(Is a directory\)", call, tmp_path / "folder")
    refused(r"cannot keep models in .*\(Not a directory\): choose a path", run, tmp_path / "file" / "bank")
    refused("there is no bank at", Bank.open, tmp_path / ("x" * 5000))
    refused(r"cannot keep models in .*\(File name too long\)", run, tmp_path / ("x" * 5000))
    assert_same(run(tmp_path / "new" / "folder" / "bank", subsets=1), run(tmp_path / "bank", subsets=1))


@pytest.mark.parametrize("full_at", ["plan.json", "model-00001.safetensors", "bank"])
def test_a_full_disk_is_told_and_the_bank_goes_on_afterwards(tmp_path, reference, monkeypatch, full_at):
    replace, trained = os.replace, []

    def full(source, target):
        if Path(target).name == full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UndeError, match=rf"cannot write .*{full_at} \(No space left on device\).*again"):
        run(tmp_path / "bank", train=counting(trained))
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.partial"))
    assert_same(run(tmp_path / "bank", train=counting(trained)), reference)
    assert len(trained) == MODELS + (full_at == "model-00001.safetensors")
