"""`unde plan`: what a run will need, before anything is paid for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unde import console
from unde.cli.config import Config
from unde.cli.options import (
    HF,
    Exclude,
    GroupsName,
    Memory,
    MethodName,
    Projection,
    StoreDtype,
    TrainingOptions,
    build_method,
    check_format,
    local_path,
)
from unde.errors import UndeError

if TYPE_CHECKING:
    from unde.cli.project import Project

WORKERS = "Several workers"


def plan(
    model: TrainingOptions,
    hf_config: Annotated[
        Path | None,
        typer.Option(
            parser=local_path,
            metavar="FILE",
            help="config.json of a model, or its folder, where there are no weights and no data yet: give --examples "
            "and --seq-len",
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
    batch_size: Annotated[int | None, typer.Option("--batch-size", hidden=True)] = None,
    store_dtype: StoreDtype = "auto",
    memory: Memory = "2GB",
    queries: Annotated[int, typer.Option(help="how many to score and to learn weights on")] = 100,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="say what each of N workers does, and how long", rich_help_panel=WORKERS
        ),
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option(help="operations a second of a worker's passes, such as 200T", rich_help_panel=WORKERS),
    ] = None,
    cpu_flops: Annotated[
        str | None,
        typer.Option(
            help="the same of its processor, which kernels run on (default: measured here)",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            help="bytes a second that a worker reads or writes, such as 1GB", rich_help_panel=WORKERS
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="table or json")] = "table",
    config: Config = None,
) -> None:
    """Say what an index will need: features, disk, memory by stage, operations relative to training.

    Nothing is computed, the model runs on shapes alone; with --hf-config not even its weights are needed. Checkpoints
    that are not there yet are given as a number, --checkpoints 5.

    Examples:

    `unde plan my_project.setup:make --method ekfac`

    `unde plan --hf-model ./my-gpt2 --data train.jsonl --seq-len 512`

    `unde plan --hf-config my_model/ --examples 100000 --seq-len 512 --projection "kron(16)"`

    `unde plan --hf-config my_model/ --examples 1000000 --seq-len 512 --workers 64 --flops 200T --disk 1GB`
    """
    from dataclasses import replace

    from unde.cli.project import Project
    from unde.index import Index

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
        if model.checkpoints is not None:
            raise UndeError(f"--checkpoints {model.checkpoints}: with --hf-config give a number")
        network, task, shape = _of_config(hf_config, examples, model.seq_len, model.trust_remote_code)
    else:
        project = Project(model)
        network, task = project.setup.model, project.setup.task
        shape = _of_data(project, examples)
        count = len(project.checkpoints) if project.checkpoints is not None else count
    made = Index.plan(
        network,
        task,
        **shape,
        method=build_method(method, projection),
        groups=groups,
        exclude=exclude or (),
        batch_size=batch_size,
        store_dtype=store_dtype,
        checkpoints=1 if count is None else count,
        queries=queries,
        memory=memory,
        workers=workers,
        flops=flops,
        cpu_flops=cpu_flops,
        disk=disk,
    )
    console.echo(json.dumps(made.as_dict(), indent=1) if format == "json" else str(made))


def _of_config(
    config: Path, examples: int | None, seq_len: int | None, trust_remote_code: bool
) -> tuple[Any, Any, dict[str, Any]]:
    for name, value in (("--examples", examples), ("--seq-len", seq_len)):
        if value is None:
            raise UndeError(f"{name} is missing: a config does not say how much data there will be")
    assert seq_len is not None
    from unde.integrations.config import planned

    model, task, shape = planned(config, seq_len, trust_remote_code)
    return model, task, shape | {"n_examples": examples}


def _of_data(project: Project, examples: int | None) -> dict[str, Any]:
    """The example that a build settles its passes by, and how many there are."""
    from unde.gradients.feature_pass import largest

    setup = project.setup
    rows = setup.rows(setup.train_data)
    return {"example": rows.batch([largest(rows)]), "n_examples": len(rows) if examples is None else examples}
