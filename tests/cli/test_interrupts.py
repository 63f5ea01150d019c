"""Ctrl-C and SIGTERM: one line that says how far it got and how to go on, the exit code of the signal, no traceback."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from unde import cli, console
from unde.cli.interrupts import Interrupted, Terminated, unwinding_on_sigterm

SLOW = """
import os, time
import torch
import unde

class Slow(unde.tasks.Classification):
    def loss(self, model, batch):
        time.sleep(float(os.environ["SECONDS_FOR_A_BATCH"]))
        return super().loss(model, batch)

def make():
    torch.manual_seed(0)
    x = torch.randn(2000, 4)
    return unde.Setup(torch.nn.Linear(4, 2), Slow(), (x, (x[:, 0] > 0).long()))
"""
# A shell may start processes with Ctrl-C ignored.
PROGRAM = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom unde.cli import main; main()"
COMMAND = [sys.executable, "-c", PROGRAM, "build", "slow:make", "--out", "idx", "--memory", "64kB"]


def start(folder, seconds, *options):
    environment = os.environ | {"SECONDS_FOR_A_BATCH": str(seconds), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, *options], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )


def shards(folder):
    return len(list(folder.glob("idx/shards/*.safetensors")))


def interrupted(folder, number, *options):
    """What a build printed that was sent a signal once it had written another shard, and its exit code."""
    before, process = shards(folder), start(folder, 0.3, *options)
    give_up = time.monotonic() + 60
    while shards(folder) == before and process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.01)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1].splitlines()
    return said, process.returncode


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_build_that_is_interrupted_says_how_to_go_on(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    for number, code, *options in ((signal.SIGINT, 130), (signal.SIGTERM, 143, "--num-workers", "1")):
        said, ended = interrupted(tmp_path, number, *options)
        assert ended == code, said
        assert not [line for line in said if "Traceback" in line or "error" in line.lower()]
        last = re.fullmatch(
            r"interrupted after ([\d,]+) of ([\d,]+) examples; run the same command again, it goes on where it stopped",
            said[-1],
        )
        assert last, said
        done, total = (int(group.replace(",", "")) for group in last.groups())
        assert 256 <= done < total <= 2000  # a shard of one pass, at least
        assert len([line for line in said if "interrupted" in line]) == 1
    kept = shards(tmp_path)
    assert 2 <= kept < 8
    finished = start(tmp_path, 0)
    said = finished.communicate(timeout=120)[1]
    assert finished.returncode == 0, said
    assert shards(tmp_path) == 8
    assert f"going on: {2000 - 256 * kept:,} of 2,000 are still to do" in said


def failing_with(error):
    def measure(*_, **__):
        with console.progress("timing", 16, unit="runs") as advance:
            advance(3)
            raise error

    return measure


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Terminated(), 143)])
def test_commands_that_keep_nothing_say_so(project, monkeypatch, capsys, error, code):
    monkeypatch.setattr("unde.bench.measure", failing_with(error))
    monkeypatch.setattr("sys.argv", ["unde", "bench", f"{project}:make"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == code
    said = "interrupted after 3 of 16 runs; run the same command again, it starts from the beginning\n"
    assert capsys.readouterr().err == said


def test_an_interrupt_before_anything_is_counted(project, monkeypatch):
    monkeypatch.setattr("unde.recipe.imported", lambda target: (_ for _ in ()).throw(KeyboardInterrupt()))
    result = CliRunner().invoke(cli.app, ["build", f"{project}:make", "--out", "idx"])
    assert isinstance(result.exception, Interrupted)
    assert str(result.exception) == "interrupted; run the same command again, it goes on where it stopped"


def test_sigterm_is_left_as_it_was():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), unwinding_on_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_forked_process_that_is_terminated_just_ends():
    with unwinding_on_sigterm():
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(1)  # whatever is raised here is none of pytest's business
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
