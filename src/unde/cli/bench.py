"""`unde bench`: the cost of features on a model."""

from __future__ import annotations

from typing import Annotated

import typer

from unde import console
from unde.cli.options import ModelOptions


def bench(
    model: ModelOptions,
    rank: Annotated[int, typer.Option(help="rank of the two-sided projection")] = 16,
    batch_size: Annotated[int, typer.Option(help="examples in one pass; fewer need less memory")] = 32,
    runs: Annotated[int, typer.Option(help="how often each is timed, in turns")] = 15,
) -> None:
    """Measure the cost of features on your model, as a ratio to one plain training pass.

    Example: `unde bench my_project.setup:make --rank 16`, or with --hf-model and --data
    """
    from unde.bench import measure
    from unde.cli.project import Project

    console.echo(measure(Project(model).setup, rank=rank, batch_size=batch_size, runs=runs))
