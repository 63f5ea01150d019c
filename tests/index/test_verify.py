"""Every byte of an index, a bank and weights is looked at; what is damaged is named, and the advice restores it."""

import json
import random
import shutil
from pathlib import Path

import bank_jobs
import pytest
import torch
from typer.testing import CliRunner

import toy
from unde import Index, UndeError, Weights, cli
from unde.evaluate import Bank
from unde.index.verify import verify
from unde.methods import EKFAC
from unde.store import layout
from unde.tasks import Classification


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return toy.everything(tmp_path_factory.mktemp("whole") / "i").folder


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "i"))


def checked(folder: Path) -> list[str]:
    """Every file with a checksum."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in (layout.LOG, layout.LOCK))
    return sorted(str(p.relative_to(folder)) for p in files)


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def test_a_whole_index_is_whole_and_every_file_is_counted(copy):
    index = Index.open(copy)
    found = index.verify()
    assert found and not found.unfinished and found.files == len(checked(copy))
    assert found.bytes == sum((copy / name).stat().st_size for name in checked(copy))
    result = invoke("verify", copy)
    assert result.exit_code == 0 and result.stdout.count("\n") == 1 and "whole" in result.stdout


def test_a_damaged_byte_is_named_with_what_restores_it(whole, copy):
    names = checked(whole)
    # halves are of models that were trained: test_calibrate.py; matrices of whitening: below
    others = {".lock", "change.json", "log.jsonl", "scratch", "halves", layout.CARD, layout.MATRICES}
    assert {name.partition("/")[0] for name in names} == {e.name for e in layout.ENTRIES} - others
    for name in names:
        path, before = copy / name, (copy / name).read_bytes()
        toy.flip(path, len(before) - 5)
        [problem] = verify(copy).problems
        assert name.startswith(problem.name) and problem.kind in ("damaged", "foreign"), problem
        entry = name.removeprefix("fisher/").removeprefix("fisher-true/").partition("/")[0]
        assert layout.repair_advice(entry) == problem.advice
        path.write_bytes(before)


@pytest.mark.parametrize("calibration", [False, True])
def test_flips_anywhere_are_found_or_harmless(copy, calibration):
    """A calibration apart: it is a large part of all bytes."""
    chance = random.Random(0)
    names = [name for name in checked(copy) if (name == layout.CALIBRATION) == calibration]
    for _ in range(60 if calibration else 250):
        path = copy / chance.choice(names)
        before = path.read_bytes()
        at = chance.randrange(len(before))
        toy.flip(path, at, chance.randrange(8))
        if verify(copy):  # spaces of JSON, or names that the reader of the format ignores
            assert before[at : at + 1].isspace() or path.name == layout.SOURCE, (path, at)
        path.write_bytes(before)


def test_the_advice_restores_every_entry(whole, copy):
    want = toy.content(whole)
    # trained anew they have other seconds: test_calibrate.py
    others = (
        layout.CHANGE,
        layout.LOG,
        layout.LOCK,
        layout.SOURCE,
        layout.SCRATCH,
        layout.CALIBRATION_HALVES,
        layout.CARD,
        layout.MATRICES,
    )
    for name in [entry.name for entry in layout.ENTRIES if entry.name not in others]:
        path = copy / name
        toy.flip(path if path.is_file() else next(p for p in sorted(path.rglob("*.safetensors"))), 12)
        assert not verify(copy)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        toy.everything(copy)
        assert verify(copy) and not verify(copy).unfinished
        assert toy.content(copy) == want, name


def test_what_is_missing_is_unfinished_and_not_damaged(copy):
    for name in ("c00-000000", "c00-000002"):
        (copy / "shards" / f"{name}.safetensors").unlink()
    found = verify(copy)
    assert found and "2 of 3 shards are missing" in found.unfinished
    result = invoke("verify", copy, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and told["sound"] and "2 of 3" in told["unfinished"]
    shutil.rmtree(copy / "fisher")
    assert "fisher is missing" in verify(copy).unfinished


def test_lost_files_that_are_no_shards(copy):
    lost = ("ids.json", "probe.safetensors")
    for name in lost:
        (copy / name).unlink()
    assert {(p.name, p.kind) for p in verify(copy).problems} == {(name, "missing") for name in lost}
    (copy / "manifest.json").unlink()
    assert ("manifest.json", "missing") in {(p.name, p.kind) for p in verify(copy).problems}


def test_whitening_that_is_lost_or_foreign(tmp_path):
    method = EKFAC(projection="factored(2)")
    one, other = (toy.build(tmp_path / str(seed), model=toy.net(seed), method=method) for seed in (0, 5))
    (one.folder / "projection.safetensors").unlink()
    assert [(p.name, p.kind) for p in one.verify().problems] == [("projection.safetensors", "missing")]
    shutil.copy(other.folder / "projection.safetensors", one.folder / "projection.safetensors")
    assert [(p.name, p.kind) for p in one.verify().problems] == [("projection.safetensors", "foreign")]


def test_what_is_foreign(copy, tmp_path):
    method = EKFAC(projection="kron(2)", fisher="sampled")
    other = toy.build(tmp_path / "other", model=toy.net(5), method=method)
    shutil.copy(other.folder / "shards/c00-000001.safetensors", copy / "shards/c00-000001.safetensors")
    shutil.copy(copy / "shards/c00-000000.safetensors", copy / "shards/c00-000007.safetensors")
    (copy / "notes.txt").write_text("mine")
    (copy / "probe.safetensors").rename(tmp_path / "probe")
    (copy / "probe.safetensors").symlink_to(tmp_path / "probe")
    kinds = {p.name: p.kind for p in verify(copy).problems}
    shards = {f"shards/c00-00000{i}.safetensors" for i in (1, 7)}
    assert set(kinds) == shards | {"notes.txt", "probe.safetensors"}
    assert set(kinds.values()) <= {"foreign", "damaged"}
    assert kinds["shards/c00-000001.safetensors"] == "foreign"
    shutil.rmtree(copy / "fisher")
    shutil.copytree(other.folder / "fisher", copy / "fisher")
    assert {p.name: p.kind for p in verify(copy).problems}["fisher"] == "foreign"


def test_the_exit_code_and_the_advice_on_the_command_line(copy):
    toy.flip(copy / "shards/c00-000001.safetensors", -9)
    result = invoke("verify", copy)
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert "shards/c00-000001.safetensors is damaged" in said and layout.repair_advice("shards") in said
    told = json.loads(invoke("verify", copy, "--json").stdout)
    assert not told["sound"] and [p["name"] for p in told["problems"]] == ["shards/c00-000001.safetensors"]


def test_banks_and_weights(tmp_path):
    bank_jobs.run(tmp_path / "b.npz")
    result = invoke("verify", tmp_path / "b.npz")
    assert result.exit_code == 0 and "bank, whole" in result.stdout
    toy.flip(tmp_path / "b.npz", 400)
    result = invoke("verify", tmp_path / "b.npz")
    said = " ".join(result.stdout.split())
    assert result.exit_code == 1 and "Bank.run with the same arguments makes it anew" in said
    (tmp_path / "b.npz").unlink()
    # neither a bank nor one begun
    assert isinstance(invoke("verify", tmp_path / "b.npz").exception, UndeError)
    Weights(torch.tensor([0.5, 1.5]), ["a", "b"]).save(tmp_path / "w.json")
    assert invoke("verify", tmp_path / "w.json").exit_code == 0
    text = (tmp_path / "w.json").read_text()
    (tmp_path / "w.json").write_text(text.replace("1.5", "1.25"))
    result = invoke("verify", tmp_path / "w.json")
    assert result.exit_code == 1 and "learn and save them again" in result.stdout


def test_a_bank_that_is_not_finished(tmp_path):
    def train(indices, seed):
        if len(list((tmp_path / "b.npz.parts").glob("model-*"))) == 3:
            raise RuntimeError("stop")
        return torch.zeros(1)

    with pytest.raises(Exception, match="stop"):
        Bank.run(tmp_path / "b.npz", train=train, utility=lambda m: m, n_train=10, subsets=6, name="x")
    for name in ("b.npz", "b.npz.parts"):
        result = invoke("verify", tmp_path / name)
        assert result.exit_code == 0 and "3 of 6 models are trained" in " ".join(result.stdout.split())
    toy.flip(tmp_path / "b.npz.parts" / "model-00001.safetensors", -2)
    result = invoke("verify", tmp_path / "b.npz")
    assert result.exit_code == 1 and "trains this model again" in " ".join(result.stdout.split())


def test_opening_does_not_need_a_look_at_everything(copy):
    shutil.rmtree(copy / "kernels")  # of all settings that were calibrated
    Index.open(copy, model=toy.net(), task=Classification()).score(toy.data(3, seed=3), "ekfac").total()
    toy.flip(next((copy / "kernels").rglob("moments.safetensors")), -3)
    index = Index.open(copy, model=toy.net(), task=Classification())
    assert not index.verify()
    index.score(toy.data(3, seed=3), "ekfac").total()
    assert index.verify()  # it was made anew


def test_a_source_that_lost_its_checksum(copy):
    path = copy / layout.SOURCE
    path.write_text(path.read_text().replace('"checksum"', '"checksun"'))
    [problem] = verify(copy).problems
    assert problem.name == layout.SOURCE and problem.kind == "damaged"
