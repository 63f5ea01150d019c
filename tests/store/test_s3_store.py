"""The protocol of S3, spoken with a server on this machine: builds, kills, races, damage, copies."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest
import torch
from remote_toy import content

import toy
from unde import Index, UndeError, Weights
from unde.evaluate import Bank
from unde.methods import EKFAC, TRAK
from unde.store.remote import Remote, Unreachable
from unde.tasks import Classification

HERE = Path(__file__).parent
QUERIES = toy.data(3, seed=3)


def test_unverified_shards_are_fetched_when_they_are_needed(tmp_path, s3, cache_folder, monkeypatch):
    toy.build(s3, method=TRAK(projection="kron(3)"))
    monkeypatch.setenv("UNDE_CACHE", str(tmp_path / "other"))
    index = Index.open(s3, model=toy.net(), task=Classification(), verify=False)
    assert not (tmp_path / "other").exists()
    assert index.score(QUERIES).total().shape == (3, 22)
    assert list((tmp_path / "other").glob("*/*"))


def test_a_killed_writer(tmp_path, s3):
    child = [sys.executable, str(HERE / "kill_writer.py"), str(s3), "3"]
    run = subprocess.run(child, capture_output=True, text=True, timeout=120)
    assert run.returncode == -signal.SIGKILL, run.stderr
    left = [name for name in content(s3) if name.startswith("shards/")]
    assert len(left) == 2
    toy.build(s3, 30, ids=list(range(30)))
    assert content(s3) == toy.content(toy.build(tmp_path / "i", 30, ids=list(range(30))).folder)


def test_of_many_that_create_an_object_one_does(s3):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: (s3 / "x").create(b"%d" % i), range(8)))
    assert sum(made) == 1
    assert (s3 / "x").read_bytes() == b"%d" % made.index(True)


def test_a_conflict_is_tried_again(s3, monkeypatch):
    """As S3 asks for while two conditional writes are under way."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fs = fsspec.core.url_to_fs(str(s3))[0]
    conflict = OSError(5, "An error occurred (ConditionalRequestConflict)")
    with mock.patch.object(fs, "pipe_file", side_effect=[conflict, None]) as put:
        assert (s3 / "x").create(b"1")
    assert put.call_count == 2
    with (
        mock.patch.object(fs, "pipe_file", side_effect=conflict),
        pytest.raises(Unreachable, match=r"cannot write s3://.*ConditionalRequestConflict"),
    ):
        (s3 / "x").create(b"1")


def test_what_others_write_is_seen(s3):
    (s3 / "i" / "a").write_bytes(b"1")
    assert [p.name for p in (s3 / "i").iterdir()] == ["a"]
    other = fsspec.filesystem("s3", skip_instance_cache=True)
    other.pipe_file(f"{s3}/i/b", b"23")
    assert (s3 / "i" / "b").stat().st_size == 2
    assert (s3 / "i").sizes() == {"a": 1, "b": 2}
    assert [p.name for p in (s3 / "i").iterdir()] == ["a", "b"]
    other.rm_file(f"{s3}/i/a")
    assert not (s3 / "i" / "a").exists()


def test_two_coordinators_at_once(tmp_path, s3):
    """Each would settle another pass size; both end with the index that one of them has resolved."""
    method, made, wanted, both = EKFAC(projection="factored(2)"), [], set(), threading.Barrier(2)

    def create(self, data, real=Remote.create):
        if self.name in ("manifest.json", "projection.safetensors"):
            wanted.add(data)
            both.wait(30)  # each has found nothing there
        return real(self, data)

    def build(memory, model, data):
        options = {"method": method, "memory": memory, "progress": False}
        made.append(Index.build(model, Classification(), data, s3, **options))

    # Made here: drawn in two threads at once they would differ.
    models, data = [toy.net(), toy.net()], [toy.data(40), toy.data(40)]
    with pytest.MonkeyPatch.context() as patch, toy.cut(), ThreadPoolExecutor(2) as pool:
        patch.setattr(Remote, "create", create)
        list(pool.map(build, ("50MB", "3kB"), models, data))
    assert len(wanted) > 2, "both wanted the same: nothing was at stake"
    assert made[0].manifest == made[1].manifest
    index = Index.open(s3, model=toy.net(), task=Classification(), train_data=toy.data(40))
    want = toy.build(tmp_path / "i", 40, method=method)
    assert torch.allclose(index.score(QUERIES).total(), want.score(QUERIES).total(), rtol=1e-4, atol=1e-6)


def test_several_processes(tmp_path, s3, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    made = toy.build(str(s3), executor="processes:2", recipe="projects:make")
    assert content(made.folder) == toy.content(toy.build(tmp_path / "i").folder)


def test_a_bucket_that_is_not_there(s3_server):
    for call in (lambda url: toy.build(url), Index.open, Bank.open, Weights.load):
        with pytest.raises(
            UndeError, match=r"s3://no-such-bucket/.*there is no such bucket or container, make it"
        ):
            call("s3://no-such-bucket/i")


class NoCredentialsError(Exception):
    """As botocore calls it."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            PermissionError("Forbidden"),
            r"access is denied \(PermissionError: Forbidden\): check the credentials",
        ),
        (NoCredentialsError("none"), r"access is denied \(NoCredentialsError: none\): check"),
        (
            TimeoutError("too long"),
            r"\(TimeoutError: too long\): check its name and the network, and run the same",
        ),
    ],
    ids=["denied", "no credentials", "no network"],
)
def test_a_store_that_does_not_answer(s3, tmp_path, monkeypatch, error, told):
    """Nothing is taken for missing or damaged because nobody could look."""
    index, weights, bank = f"{s3}/i", f"{s3}/w.json", f"{s3}/b.npz"
    options = {"train": _train, "utility": _utility, "n_train": 12, "subsets": 2}
    toy.build(index, ids=list(range(22)))
    Weights.uniform(["a"]).save(weights)
    with pytest.raises(UndeError, match="power cut"):
        Bank.run(bank, **(options | {"train": mock.Mock(side_effect=[1.0, OSError("power cut")])}), name="b")
    whole, fs = content(s3), fsspec.core.url_to_fs(index)[0]
    for number, (call, name, *broken) in enumerate(
        (
            (lambda: Index.open(index), "manifest.json", "info", "cat_file"),
            (lambda: Index.open(index), "ids.json", "cat_file"),
            (lambda: Index.open(index), "c00-000001.safetensors", "info", "get_file"),
            (lambda: toy.build(index, ids=list(range(22))), "manifest.json", "info", "cat_file"),
            (lambda: toy.build(index, ids=list(range(22))), "c00-000001.safetensors", "info", "get_file"),
            (lambda: Weights.load(weights), "w.json", "cat_file"),
            (lambda: Bank.open(bank), "b.npz", "info"),
            (lambda: Bank.run(bank, **options, name="b"), "plan.json", "info", "cat_file"),
            (lambda: Bank.run(bank, **options, name="b"), "model-00000.safetensors", "info", "get_file"),
        )
    ):
        for method in broken:
            monkeypatch.setenv("UNDE_CACHE", str(tmp_path / f"{number} {method}"))
            real = getattr(fs, method)

            def fails(path, *args, real=real, name=name, **kwargs):
                if path.endswith(name):
                    raise error
                return real(path, *args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(fs, method, fails)
                with pytest.raises(Unreachable, match=rf"cannot read s3://.*{name}.*{told}"):
                    call()
    assert content(s3) == whole


def _train(indices, seed):
    return float(indices.mean())


def _utility(model):
    return np.array([model, -model])
