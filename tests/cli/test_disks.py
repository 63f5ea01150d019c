"""Folders that cannot be written, disks that are full, files that cannot be read: commands work, or say why."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from commands import invoke, run

from refusals import refused
from unde import Index, UndeError, Weights, cli
from unde.index.query_features import QueryFeatures


def refuse(monkeypatch, folder: Path, number: int = errno.EROFS) -> None:
    """Nothing can be made, written or replaced in a folder, whoever asks."""
    real_open, real_mkdir, real_replace = os.open, os.mkdir, os.replace
    folder = folder.absolute()

    def check(path) -> None:
        if Path(os.path.abspath(os.fspath(path))).is_relative_to(folder):
            raise OSError(number, os.strerror(number), str(path))

    def opened(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            check(path)
        return real_open(path, flags, *args, **kwargs)

    def made(path, *args, **kwargs):
        if not os.path.exists(path):
            check(path)
        return real_mkdir(path, *args, **kwargs)

    def replaced(a, b):
        check(b)
        return real_replace(a, b)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "mkdir", made)
    monkeypatch.setattr(os, "replace", replaced)


class Result:
    """What a process of its own did with a command. It is a fork, so that nothing is imported again."""

    def __init__(self, folder: Path, *arguments, before=lambda: None, out: int | None = None) -> None:
        reader, writer = os.pipe()
        with tempfile.TemporaryFile() as stdout:
            child = os.fork()
            if child == 0:
                code = 70
                try:
                    os.dup2(stdout.fileno() if out is None else out, 1)
                    os.dup2(writer, 2)
                    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
                    sys.argv = ["unde", *map(str, arguments)]
                    os.chdir(folder)
                    before()
                    cli.main()
                except SystemExit as e:
                    code = e.code or 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    with suppress(OSError):
                        sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            self.code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            stdout.seek(0)
            self.out = stdout.read().decode()
        os.close(writer)
        with os.fdopen(reader) as stderr:
            self.said = " ".join(stderr.read().split())


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_an_index_that_cannot_be_written_is_asked(built, monkeypatch, number):
    ask = ("attribute", built, "--index", "idx", "--format", "json")
    want = json.loads(run(*ask))
    for name in ("queries", "kernels"):
        shutil.rmtree(Path("idx") / name, ignore_errors=True)
    before = sorted(Path("idx").rglob("*"))
    refuse(monkeypatch, Path("idx"), number)
    assert json.loads(run(*ask)) == want
    assert "are not cached for the next command" in " ".join(invoke(*ask).split())
    run("learn", built, "--index", "idx", "--out", "w2.json", "--queries", "learn", "--k", 5)
    run(f"report {built} --index idx --weights w2.json --out page.html --first 1")
    assert sorted(Path("idx").rglob("*")) == before
    index = Index.open("idx", model=None)
    assert len(index) == 60 and index.verify()


def test_in_python_features_of_queries_need_a_place_of_their_own(built, tmp_path, monkeypatch):
    made = QueryFeatures("0" * 32, torch.ones(1, 2, 3), torch.ones(1, 2), ["0" * 16] * 2)
    refuse(monkeypatch, tmp_path / "idx")
    with pytest.raises(
        UndeError, match=r"cannot make the folder of .*x\.safetensors \(Read-only file system\)"
    ):
        made.save(tmp_path / "idx" / "new" / "x.safetensors")
    with pytest.raises(UndeError, match=r"cannot take the lock .*\.lock \(Read-only file system\)"):
        run("build", built, "--out", "idx", "--projection", "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_another_user_asks(built, tmp_path):
    """Without a mock: somebody who may read the folder and not write in it."""

    def nobody():
        os.setgid(65534)
        os.setuid(65534)

    for path in tmp_path.parents:
        if path.owner() == "root" and len(path.parts) > 2:
            path.chmod(path.stat().st_mode | 0o055)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    want = json.loads(run("attribute", built, "--index", "idx", "--format", "json"))
    shutil.rmtree("idx/queries")
    shutil.rmtree("idx/kernels")
    ask = ("attribute", built, "--index", "idx", "--format", "json")
    result = Result(tmp_path, *ask, before=nobody)
    assert result.code == 0, result.said
    assert json.loads(result.out) == want and not Path("idx/queries").exists()
    Path("idx/shards").chmod(0o700)
    result = Result(tmp_path, *ask, before=nobody)
    assert result.code == 2 and "(Permission denied)" in result.said and "idx/shards" in result.said
    assert "missing" not in result.said
    Path("idx/manifest.json").chmod(0o600)
    result = Result(tmp_path, *ask, before=nobody)
    assert result.code == 2 and "cannot read idx/manifest.json (Permission denied)" in result.said
    Path("idx").chmod(0o700)
    for line in (ask, ("verify", "idx"), ("build", built, "--out", "idx"), ("verify", "w.json")):
        result = Result(tmp_path, *line, before=nobody)
        assert "Traceback" not in result.said, result.said
        assert result.code in ((1, 2) if "w.json" not in line else (0,)), result.said


def unwarned(said):
    """Without what is said of a model that was never trained."""
    return re.sub(r"The model has hardly fitted.*?trained weights\.\s*", "", said)


@pytest.mark.parametrize("format", ["table", "json", "csv"])
def test_the_output_goes_to_a_full_disk(built, tmp_path, format):
    with open("/dev/full", "w") as full:
        result = Result(tmp_path, "attribute", built, "--index", "idx", "--format", format, out=full.fileno())
    assert result.code == 2
    assert unwarned(result.said) == (
        "error: cannot write the output (No space left on device): make room there, and run it again"
    )


def test_nothing_more_is_said_when_python_ends(tmp_path):
    """What is left in the buffer of stdout is tried again at exit, unless it is sent elsewhere."""
    code = "import sys; from unde import console, UndeError\ntry: console.echo('x')\nexcept UndeError: sys.exit(2)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == ""


def test_whoever_reads_the_output_has_seen_enough(built, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    result = Result(tmp_path, "attribute", built, "--index", "idx", "--format", "csv", out=writer)
    os.close(writer)
    assert unwarned(result.said) == ""


def limit(size: int):
    def before():
        sys.dont_write_bytecode = True  # Python would keep what it wrote of a module
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return before


def test_weights_on_a_full_disk(built, tmp_path):
    old = Path("w.json").read_bytes()
    line = ("learn", built, "--index", "idx", "--out", "w.json", "--queries", "learn", "--k", 5)
    result = Result(tmp_path, *line, before=limit(400))
    assert result.code == 2 and "cannot write weights to 'w.json' (File too large)" in result.said
    assert Path("w.json").read_bytes() == old and not list(tmp_path.glob("*.partial"))


def test_a_build_on_a_full_disk_goes_on(project, tmp_path):
    line = ("build", f"{project}:make", "--out", "idx", "--projection", "none")
    for room in (10, 2000):
        result = Result(tmp_path, *line, before=limit(room))
        assert result.code == 2 and "(File too large)" in result.said and "Traceback" not in result.said
    run(*line)
    assert "whole" in run("verify", "idx")


@pytest.mark.parametrize("out", ["missing/w.json", ".", "/dev/null", "/dev/full"])
def test_places_where_weights_cannot_be(built, out):
    device = Path("/dev/full").stat().st_rdev
    with pytest.raises(UndeError, match=r"no folder missing|is a folder|\(it is a device\)"):
        run("learn", built, "--index", "idx", "--out", out, "--queries", "learn", "--k", 5)
    assert Path("/dev/full").stat().st_rdev == device


def test_a_shard_that_cannot_be_read_is_not_called_missing(built, monkeypatch):
    real = os.stat

    def stat(path, *args, **kwargs):
        if str(path).endswith("c00-000000.safetensors"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "lstat", stat)
    refused(r"c00-000000\.safetensors is unreadable \(Permission denied\)", Index.open, "idx")


@pytest.mark.parametrize("place", ["~/idx", "~/runs/idx"])
def test_a_home_folder_is_understood_by_every_command(project, tmp_path, monkeypatch, place):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    target = f"{project}:make"
    run("build", target, "--out", place, "--projection", "none")
    run(f"learn --index {place} --out ~/w.json --queries learn --k 5")
    run(f"attribute --index {place} --weights ~/w.json")
    run(f"report --index {place} --weights ~/w.json --out ~/page.html --first 1")
    run("verify", place)
    run("verify", "~/w.json")
    assert not Path("~").exists() and (tmp_path / "home" / "page.html").exists()
    weights = Weights.load("~/w.json")
    weights.save("~/w2.json")
    index = Index.open(place)
    assert (tmp_path / "home" / "w2.json").exists() and index.folder.is_absolute()
