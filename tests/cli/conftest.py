"""Projects and indexes that the commands are tried on."""

import pytest
from commands import add_project, run


@pytest.fixture
def project(tmp_path, monkeypatch):
    return add_project(tmp_path, monkeypatch)


@pytest.fixture
def built(project):
    run("build", f"{project}:make", "--out", "idx", "--projection", "none", "--batch-size", 16)
    run(f"learn {project}:make --index idx --out w.json --queries learn --k 5 --weight-decay 0.1")
    return f"{project}:make"


@pytest.fixture
def large(project):
    run("build", f"{project}:large", "--out", "idx", "--projection", "none", "--method", "tracin")
    return f"{project}:large"
