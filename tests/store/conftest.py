"""Stores that tests write to: in memory, and one that speaks the protocol of S3, on this machine."""

import logging
import os
import uuid

import fsspec
import pytest

from unde.store.remote import Remote


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """Copies of one test are nothing to another."""
    monkeypatch.setenv("UNDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["memory", "s3"])
def remote(request):
    """A place in each kind of store."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def memory():
    """A place that is gone after the test."""
    home = Remote(f"memory://{uuid.uuid4().hex}")
    yield home
    fs = fsspec.filesystem("memory")
    if home.exists():
        fs.rm(home.url, recursive=True)


@pytest.fixture(scope="session")
def s3_server():
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    with pytest.MonkeyPatch.context() as patch:
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        host, port = server.get_host_and_port()
        for name in [n for n in os.environ if n.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        fs = fsspec.filesystem("s3", skip_instance_cache=True)
        fs.mkdir("bucket")
        yield server
        server.stop()


@pytest.fixture
def s3(s3_server):
    """A place of its own for each test."""
    return Remote(f"s3://bucket/{uuid.uuid4().hex}")
