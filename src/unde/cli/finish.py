"""`unde finish`: what the workers of an array have left of an index."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unde import console
from unde.cli import completion
from unde.cli.build import said
from unde.cli.options import (
    Address,
    Checkpoints,
    Data,
    Device,
    Engine,
    Gpus,
    HFModel,
    Memory,
    SeqLen,
    Target,
    TargetField,
    TextField,
    Threads,
    Timeout,
    TrustRemoteCode,
    Workers,
    source_of,
)
from unde.cli.project import Project, saved_target
from unde.index import Index
from unde.parallel import named
from unde.store.remote import place


def finish(
    index: Annotated[
        Any,
        typer.Argument(
            parser=place,
            metavar="DIR",
            help="folder or URL of an index that was begun",
            autocompletion=completion.indexes,
        ),
    ],
    target: Target = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    target_field: TargetField = None,
    seq_len: SeqLen = None,
    trust_remote_code: TrustRemoteCode = False,
    checkpoints: Checkpoints = None,
    memory: Memory = "2GB",
    device: Device = None,
    engine: Engine = "serial",
    threads: Threads = None,
    workers: Workers = None,
    gpus: Gpus = 0,
    address: Address = None,
    timeout: Timeout = None,
) -> None:
    """Finish an index that was begun, with everything as it was settled, and check all of it.

    For the time when all workers of an array have ended: what one of them did not get done is done here.

    Examples:

    `unde finish runs/idx`

    `unde finish runs/idx --engine processes:4`
    """
    source = source_of(hf_model, data, text_field, seq_len, trust_remote_code, target_field, checkpoints)
    project = Project(target or saved_target(index, source), source, index=index, device=device)
    setup = project.setup
    made = Index.finish(
        index,
        setup.model,
        setup.task,
        setup.train_data,
        checkpoints=project.checkpoints,
        collate=setup.collate,
        ids=setup.ids,
        device=device,
        memory=memory,
        executor=named(engine, threads=threads, workers=workers, gpus=gpus, address=address, timeout=timeout),
        recipe=project.recipe,
    )
    made.close()
    console.echo(said(made, index))
