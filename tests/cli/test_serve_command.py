"""`unde serve` opens what the other commands do, and says in one line what is wrong."""

import socket

import pytest
from commands import invoke, run

from refusals import refused
from unde.errors import UndeError
from unde.ui.explorer.app import address, open_socket

pytest.importorskip("starlette")


@pytest.fixture
def opened(monkeypatch):
    """Sessions that would be served."""
    sessions = []
    monkeypatch.setattr(
        "unde.ui.explorer.app.serve", lambda session, *rest: sessions.append((session, *rest))
    )
    return sessions


def test_it_opens_a_remembered_project_and_a_named_one(built, opened):
    run("serve", "--index", "idx", "--weights", "w.json", "--port", 0)
    run(f"serve {built} --index idx --weights a=w.json --weights b=w.json --port 0 --open")
    (one, listening, host, opening), (two, *_, opening_too) = opened
    assert list(one.weights) == ["weighted"] and list(two.weights) == ["a", "b"]
    assert (host, opening, opening_too) == ("127.0.0.1", False, True)
    assert listening.fileno() == -1  # closed behind it
    assert one.train.name(3) == "row-3" and set(one.roles) == {"eval", "learn"}
    assert one.describe()["classes"] == ["0", "1", "2"] and not one.describe()["asks"]["picture"]


def test_it_says_what_is_wrong(built, opened, tmp_path):
    with open_socket("127.0.0.1", 0) as taken, pytest.raises(UndeError, match="choose another with --port"):
        invoke("serve", "--index", "idx", "--port", taken.getsockname()[1])
    refused("no weights file", invoke, "serve", "--index", "idx", "--port", 0, "--weights", "none.json")
    refused("is a folder", invoke, "serve", "--index", "idx", "--port", 0, "--weights", "idx")
    refused("idx2", invoke, "serve", "--index", "idx2", "--port", 0)
    assert not opened


def test_the_address_that_is_printed():
    with open_socket("127.0.0.1", 0) as made:
        port = made.getsockname()[1]
        assert address(made, "127.0.0.1", "t") == f"http://127.0.0.1:{port}/?token=t"
        assert address(made, "0.0.0.0", "t") == f"http://{socket.gethostname()}:{port}/?token=t"
        assert address(made, "::1", "t") == f"http://[::1]:{port}/?token=t"
