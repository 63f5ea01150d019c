"""What the commands say of themselves, and what they have in common."""

import inspect
import re
import runpy
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from unde import cli, methods
from unde.cli import leaks, options, select
from unde.evaluate import overlap
from unde.index.select import STRATEGIES
from unde.store.codec import CODECS

COMMANDS = (
    *("demo", "plan", "build", "finish", "append", "remove", "merge"),
    *("calibrate", "learn", "attribute", "evaluate", "audit", "leaks", "select", "report", "serve"),
    *("verify", "push", "pull", "bench"),
)


def told(*arguments):
    """The help as one line, without the frames around it."""
    text = CliRunner().invoke(cli.app, [*arguments, "--help"], env={"COLUMNS": "200"}).stdout
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def test_all_commands_are_listed():
    assert tuple(get_command(cli.app).commands) == COMMANDS
    text = told()
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_with_an_example(name):
    command = get_command(cli.app).commands[name]
    first = inspect.getdoc(command.callback).splitlines()[0]
    assert len(first) > 30 and first.endswith(".")
    text = told(name)
    assert first in text
    assert re.search(rf"Examples?: .*unde {name} \S", text)


@pytest.mark.parametrize(
    "name", ["demo", "plan", "build", "learn", "attribute", "evaluate", "select", "report"]
)
def test_all_methods_are_listed(name):
    [option] = [p for p in get_command(cli.app).commands[name].params if p.name == "method"]
    assert option.help in told(name)
    known, own, _ = option.help.partition(", or MODULE:NAME of your own")
    assert own
    named = set(re.findall(r"[\w-]+", known)) - {"or"}
    assert named == {*methods.METHODS, "tracin-cosine"}
    assert all(methods.parse(name) for name in named)


def test_plan_takes_what_build_takes():
    building, planning = (
        {p.name: p for p in get_command(cli.app).commands[name].params} for name in ("build", "plan")
    )
    # What has no part in what a run needs.
    assert set(building) - set(planning) == {
        *("out", "overwrite", "num_workers", "seed", "on_bad", "second_moments"),
        *("engine", "threads", "worker", "gpus", "address", "timeout"),
    }
    for name in set(building) & set(planning) - {"workers"}:  # which a plan only reckons with
        assert building[name].default == planning[name].default, name
        assert building[name].help == planning[name].help, name


def test_names_in_help_are_those_of_the_library():
    assert options.METHODS == methods.NAMES
    assert options.CODECS == tuple(CODECS)
    assert select.STRATEGIES == STRATEGIES
    assert leaks._WORDS == overlap.SPAN_WORDS


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["report", "--help"]])
def test_help_does_without_torch(arguments):
    code = f"import sys; sys.argv = ['unde', *{arguments}]\nfrom unde.cli import main\n"
    code += "try: main()\nfinally: assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_version():
    assert re.fullmatch(r"unde \d\S*\n", CliRunner().invoke(cli.app, ["--version"]).stdout)


def test_as_a_module(monkeypatch, capsys):
    """python -m unde"""
    monkeypatch.setattr("sys.argv", ["unde", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("unde", run_name="__main__")
    assert capsys.readouterr().out.startswith("unde 0.")


FIRST_USE = """
import os, sys
import torch
for name in sys.argv[1:]:
    if not (child := os.fork()):
        import unde
        eval(f"unde.{name}")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_submodules_are_loaded_on_first_use():
    names = ["scoring.from_arrays", "tasks.Classification", "index.Index", "evaluate.lds"]
    subprocess.run([sys.executable, "-c", FIRST_USE, *names], check=True)
