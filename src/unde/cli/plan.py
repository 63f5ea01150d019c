"""`unde plan`: disk, memory and minutes of a build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from unde import console
from unde.cli.config import Config
from unde.cli.options import (
    HF,
    BatchSize,
    Exclude,
    GroupsName,
    Memory,
    MethodName,
    ModelOptions,
    Projection,
    StoreDtype,
    TrainingOptions,
    build_method,
    check_format,
    local_path,
)
from unde.errors import UndeError


def plan(
    model: TrainingOptions,
    hf_config: Annotated[
        Path | None,
        typer.Option(
            parser=local_path,
            metavar="FILE",
            help="config.json of a model, or its folder, where there are no weights and no data yet: bytes on disk "
            "alone; give --examples",
            rich_help_panel=HF,
        ),
    ] = None,
    examples: Annotated[
        int | None, typer.Option(help="training examples (default: those of the data)")
    ] = None,
    method: MethodName = "trak",
    projection: Projection = None,
    groups: GroupsName = "layer",
    exclude: Exclude = None,
    batch_size: BatchSize = None,
    store_dtype: StoreDtype = "auto",
    memory: Memory = "2GB",
    workers: Annotated[
        int, typer.Option(metavar="N", help="processes or machines that build, each as fast as this one")
    ] = 1,
    format: Annotated[str, typer.Option(help="table or json")] = "table",
    config: Config = None,
) -> None:
    """Estimate the cost of an index: bytes on disk, peak memory, minutes.

    Bytes follow from shapes; minutes and memory are measured in a few passes of the model on this machine. Checkpoints
    that are not there yet are given as a number, --checkpoints 5.

    Examples:

    `unde plan my_project.setup:make --method ekfac`

    `unde plan --hf-model ./my-gpt2 --data train.jsonl --seq-len 512 --workers 8`

    `unde plan --hf-config my_model/ --examples 100000 --projection "kron(16)"`
    """
    from dataclasses import replace

    from unde.cli.project import Project
    from unde.integrations.language import model_of_config
    from unde.plan import plan as make_plan

    check_format(format, "table", "json")
    sources = [
        model.target,
        model.hf_model or model.data or model.text_field or model.target_field,
        hf_config,
    ]
    checkpoints = model.checkpoints or ""
    count = int(checkpoints) if checkpoints.isdecimal() else None
    if count is not None:
        model = replace(model, checkpoints=None)
    if len([source for source in sources if source is not None]) != 1:
        raise UndeError(
            "expected one of three things to plan for: MODULE:FUNCTION of a setup, --hf-model with --data, or "
            "--hf-config with the config of a Hugging Face language model"
        )
    if hf_config is not None:
        if examples is None:
            raise UndeError("--examples is missing: a config does not say how much data there will be")
        if model.checkpoints is not None:
            raise UndeError(f"--checkpoints {model.checkpoints}: with --hf-config give a number")
        network, task = model_of_config(hf_config, model.trust_remote_code)
        data = collate = None
    else:
        project = Project(model)
        setup = project.setup
        network, task, data, collate = setup.model, setup.task, setup.train_data, setup.collate
        count = len(project.checkpoints) if project.checkpoints is not None else count
    result = make_plan(
        network,
        task,
        data,
        n_examples=examples,
        method=build_method(method, projection),
        groups=groups,
        exclude=exclude or (),
        batch_size=batch_size,
        collate=collate,
        store_dtype=store_dtype,
        checkpoints=1 if count is None else count,
        memory=memory,
        workers=workers,
    )
    console.echo(json.dumps(result.as_dict(), indent=1) if format == "json" else str(result))


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
