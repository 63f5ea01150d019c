"""Errors of commands name options as the command line does."""

import pytest
import typer
from commands import run

from refusals import refused
from unde.cli.app import app
from unde.cli.config import name_flags

BUILD = typer.main.get_command(app).commands["build"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("raise memory=, or build with less", "raise --memory, or build with less"),
        (
            "no features fit disk='1kB' and memory='2GB': more",
            "no features fit --disk 1kB and --memory 2GB: more",
        ),
        ("a smaller one, which disk= does not bound", "a smaller one, which --disk does not bound"),
        ("TRAK(projection='none', memory='x') is not it", "TRAK(projection='none', memory='x') is not it"),
        ("x.disk= and colour= stay", "x.disk= and colour= stay"),
        ("give batch_size=", "give --batch-size"),
    ],
)
def test_arguments_become_flags(message, says):
    assert name_flags(message, BUILD) == says


def test_a_plan_that_does_not_fit_says_so_in_flags(project):
    refused("fit --disk 100B and --memory 2GB", run, f"plan {project}:make --disk 100B")
    assert "is 1 kB: raise --memory" in run(
        f"plan {project}:make --method ekfac --projection none --memory 1KB"
    )
