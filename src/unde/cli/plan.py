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
    Checkpoints,
    Data,
    Exclude,
    Groups,
    HFModel,
    Memory,
    Method,
    Projection,
    SeqLen,
    StoreDtype,
    Target,
    TargetField,
    TextField,
    TrustRemoteCode,
    Unneeded,
    check_format,
    method_of,
    path_of,
    source_of,
)
from unde.cli.project import Project
from unde.errors import UndeError
from unde.integrations.config import model_of_config
from unde.plan import plan as make_plan


def plan(
    target: Target = None,
    hf_model: HFModel = None,
    hf_config: Annotated[
        Path | None,
        typer.Option(
            parser=path_of,
            metavar="FILE",
            help="config.json of a model, or its folder, where there are no weights and no data yet: bytes on disk "
            "alone; give --examples",
            rich_help_panel=HF,
        ),
    ] = None,
    data: Data = None,
    text_field: TextField = None,
    target_field: TargetField = None,
    seq_len: SeqLen = None,
    trust_remote_code: TrustRemoteCode = False,
    examples: Annotated[
        int | None, typer.Option(help="training examples (default: those of the data)")
    ] = None,
    method: Method = "trak",
    projection: Projection = None,
    groups: Groups = "layer",
    exclude: Exclude = None,
    checkpoints: Checkpoints = None,
    batch_size: Unneeded = None,
    store_dtype: StoreDtype = "auto",
    memory: Memory = "2GB",
    workers: Annotated[
        int, typer.Option(metavar="N", help="processes or machines that build, each as fast as this one")
    ] = 1,
    format: Annotated[str, typer.Option(help="table or json")] = "table",
    config: Config = None,
) -> None:
    """Tell what an index will take: bytes on disk, peak memory, minutes.

    Bytes follow from shapes; minutes and memory are measured in a few passes of the model on this machine. Checkpoints
    that are not there yet are given as a number, --checkpoints 5.

    Examples:

    `unde plan my_project.setup:make --method ekfac`

    `unde plan --hf-model ./my-gpt2 --data train.jsonl --seq-len 512 --workers 8`

    `unde plan --hf-config my_model/ --examples 100000 --projection "kron(16)"`
    """
    check_format(format, "table", "json")
    sources = [target, hf_model or data or text_field or target_field, hf_config]
    count = int(checkpoints) if checkpoints is not None and checkpoints.isdecimal() else None
    folder = checkpoints if count is None else None
    if len([source for source in sources if source is not None]) != 1:
        raise UndeError(
            "expected one of three things to plan for: MODULE:FUNCTION of a setup, --hf-model with --data, or "
            "--hf-config with the config of a Hugging Face language model"
        )
    if hf_config is not None:
        if examples is None:
            raise UndeError("--examples is missing: a config does not say how much data there will be")
        if folder is not None:
            raise UndeError(f"--checkpoints {folder}: with --hf-config give a number")
        model, task = model_of_config(hf_config, trust_remote_code)
        rows = collate = None
    else:
        source = source_of(hf_model, data, text_field, seq_len, trust_remote_code, target_field, folder)
        project = Project(target, source)
        setup = project.setup
        model, task, rows, collate = setup.model, setup.task, setup.train_data, setup.collate
        count = len(project.checkpoints) if project.checkpoints is not None else count
    result = make_plan(
        model,
        task,
        rows,
        n_examples=examples,
        method=method_of(method, projection),
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
