"""Ctrl-C and SIGTERM: one line that says how far it got and how to go on, the exit code of the signal, no traceback."""

import os
import re
import signal
import sys
import time

import pytest
from commands import invoke
from typer.testing import CliRunner

from unde import cli, console
from unde.cli.app import Interrupted, Terminated, unwinding_on_sigterm

WAITING = """
import os, time
from pathlib import Path
import torch
import unde

class Waiting(unde.tasks.Classification):
    def loss(self, model, batch):
        if Path("idx/manifest.json").exists():
            time.sleep(0.5)  # while a shard is written the next is made: it is to be there before that
        if len(list(Path("idx/shards").glob("*.safetensors"))) >= int(os.environ["SHARDS_TO_WAIT_AFTER"]):
            time.sleep(60)
        return super().loss(model, batch)

def make():
    torch.manual_seed(0)
    x = torch.randn(2000, 4)
    return unde.Setup(torch.nn.Linear(4, 2), Waiting(), (x, (x[:, 0] > 0).long()))
"""
COMMAND = ["build", "waiting:make", "--out", "idx", "--memory", "64kB"]


def main():
    # a shell may start processes with Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


def process(words, said):
    """Python started anew: all that happens when it ends is seen."""
    program = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\nimport test_interrupts as t; t.main()"
    command = [sys.executable, "-c", program, *words]
    stderr = (os.POSIX_SPAWN_DUP2, said.fileno(), 2)
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=[stderr])


def fork(words, said):
    """Of this process: nothing is imported again."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.dup2(said.fileno(), 2)
            sys.stderr, sys.argv = open(2, "w"), ["unde", *words]  # noqa: SIM115
            main()
        except SystemExit as e:
            code = e.code
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def shards(folder):
    return len(list(folder.glob("idx/shards/*.safetensors")))


def interrupted(folder, start, number, *options):
    """What a build printed that was sent a signal once it had written another shard, and its exit code."""
    wanted = shards(folder) + 1
    os.environ["SHARDS_TO_WAIT_AFTER"] = str(wanted)
    with open(folder / "said", "w+") as said:
        child, give_up = start([*COMMAND, *options], said), time.monotonic() + 60
        while shards(folder) < wanted and time.monotonic() < give_up:
            time.sleep(0.01)
        os.kill(child, number)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return said.read().splitlines(), code


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_build_that_is_interrupted_says_how_to_go_on(tmp_path, monkeypatch):
    (tmp_path / "waiting.py").write_text(WAITING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SHARDS_TO_WAIT_AFTER", "1")
    for start, number, code, *options in (
        (fork, signal.SIGINT, 130),
        (process, signal.SIGTERM, 143, "--num-workers", "1"),
    ):
        said, ended = interrupted(tmp_path, start, number, *options)
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
    assert shards(tmp_path) == 2
    monkeypatch.setenv("SHARDS_TO_WAIT_AFTER", "9")
    assert f"going on: {2000 - 256 * 2:,} of 2,000 are still to do" in invoke(*COMMAND)
    assert shards(tmp_path) == 8


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
    monkeypatch.setattr("unde.setup.import_target", lambda target: (_ for _ in ()).throw(KeyboardInterrupt()))
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
