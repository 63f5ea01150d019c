"""Commands on URLs: what they print and write is what they do with folders."""

import json
import uuid
from unittest import mock

import fsspec
import pytest
from commands import invoke, run

from unde import UndeError
from unde.evaluate import Bank
from unde.store.remote import Remote


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDE_CACHE", str(tmp_path / "cache"))
    home = Remote(f"memory://{uuid.uuid4().hex}")
    yield home
    if home.exists():
        fsspec.filesystem("memory").rm(home.url, recursive=True)


def train(rows, seed):
    return seed % 97


def utility(model):
    return {"eval": [model * i % 7 for i in range(1, 16)]}


def test_every_command_takes_urls(project, store, tmp_path):
    where = {"here": tmp_path / "runs", "there": store}
    (tmp_path / "runs").mkdir()
    printed = {}
    for name, home in where.items():
        built = run("build", f"{project}:make", "--out", home / "idx", "--projection", "none")
        assert built.startswith(f"{home / 'idx'}: 60 examples")
        learned = run("learn", f"{project}:make", "--index", home / "idx", "--queries", "learn", "--k", 5,
                      "--weight-decay", 0.1, "--out", home / "w.json")  # fmt: skip
        assert learned.startswith(f"{home / 'w.json'}: Weights")
        asked = ("--index", home / "idx", "--weights", home / "w.json", "--format", "json")
        printed[name] = [json.loads(run("attribute", f"{project}:make", *asked))]
        Bank.run(home / "bank.npz", train=train, utility=utility, n_train=60, subsets=8)
        printed[name] += [json.loads(run(f"evaluate {project}:make --bank", home / "bank.npz", *asked))]
        weights = f"mine={home / 'w.json'}"
        run("report", "--index", home / "idx", "--weights", weights, "--out", "r.html")
        printed[name].append((tmp_path / "r.html").read_text().replace(str(home), "HOME"))
    assert printed["there"] == printed["here"]
    one, other = (home / "idx" / "manifest.json" for home in where.values())
    assert one.read_bytes() == other.read_bytes()
    assert list((store / "idx" / "queries").iterdir())


def test_an_index_that_may_only_be_read(project, store):
    run("build", f"{project}:make", "--out", store / "idx", "--projection", "none", "--method", "tracin")
    want = run("attribute", "--index", store / "idx", "--format", "csv")
    for kept in (store / "idx" / "queries").iterdir():
        kept.unlink()
    denied = mock.Mock(side_effect=PermissionError("Forbidden"))
    with mock.patch("fsspec.implementations.memory.MemoryFileSystem.pipe_file", denied):
        told = invoke("attribute", "--index", store / "idx", "--format", "csv")
    assert want in told
    assert "features of these queries are not cached for the next command" in told
    assert denied.called


def test_push_writes_a_card(project, store, tmp_path):
    run("build", f"{project}:make", "--out", "idx", "--projection", "none", "--method", "ekfac")
    assert "README.md" in run("push", "idx", store / "hub")
    card = (store / "hub" / "README.md").read_text()
    fingerprint = json.loads((tmp_path / "idx" / "manifest.json").read_text())["models"][0]
    for words in (
        "library_name: unde", "60 examples", "EKFAC", fingerprint, "Classification", f"{project}:make", "none: how well"
    ):  # fmt: skip
        assert words in card
    assert str(tmp_path) not in card
    assert "already" in run("push", "idx", store / "hub")
    run("pull", store / "hub", "elsewhere")
    assert (tmp_path / "elsewhere" / "README.md").read_text() == card
    assert "not of the index" not in invoke("push", "elsewhere", store / "hub")
    (store / "hub" / "README.md").write_bytes(b"mine")
    assert "stays as it is" in invoke("push", "idx", store / "hub")
    assert (store / "hub" / "README.md").read_bytes() == b"mine"
    run("verify", "elsewhere")


def test_no_index_at_a_url(project, store):
    with pytest.raises(UndeError, match=r"memory://.* holds no unde index"):
        run("attribute", f"{project}:make", "--index", store / "nothing")
    with pytest.raises(UndeError, match=r"no folder memory://.*/nothing: make an index with unde build"):
        run("attribute", "--index", store / "nothing", "--query", "x")
