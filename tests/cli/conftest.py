"""Projects and indexes that the commands are tried on."""

import pytest
from commands import PROJECT, run


@pytest.fixture
def project(tmp_path, monkeypatch):
    name = f"project_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture
def built(project):
    run("build", f"{project}:make", "--out", "idx", "--projection", "none", "--batch-size", 16)
    learn = (
        "learn",
        f"{project}:make",
        "--index",
        "idx",
        "--out",
        "w.json",
        "--queries",
        "learn",
        "--no-trust",
    )
    run(*learn, "--k", 5, "--weight-decay", 0.1)
    return f"{project}:make"


@pytest.fixture
def large(project):
    run("build", f"{project}:large", "--out", "idx", "--projection", "none", "--method", "tracin")
    return f"{project}:large"
