"""`unde bench`: what features cost on a model."""

from __future__ import annotations

from typing import Annotated

import typer

from unde import console
from unde.cli.options import BatchSize, Data, HFModel, SeqLen, Target, TextField, TrustRemoteCode, source_of
from unde.cli.project import Project


def bench(
    target: Target = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    trust_remote_code: TrustRemoteCode = False,
    rank: Annotated[int, typer.Option(help="rank of the two-sided projection")] = 16,
    batch_size: BatchSize = 32,
    runs: Annotated[int, typer.Option(help="how often each is timed, in turns")] = 15,
) -> None:
    """Measure the cost of features on your model, as a ratio to one plain training pass.

    Example: `unde bench my_project.setup:make --rank 16`, or with --hf-model and --data
    """
    from unde.bench import measure

    setup = Project(target, source_of(hf_model, data, text_field, seq_len, trust_remote_code)).setup
    console.echo(measure(setup, rank=rank, batch_size=batch_size, runs=runs))
