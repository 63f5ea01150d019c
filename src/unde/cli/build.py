"""`unde build`: the gradient features of the training data, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unde import console
from unde.cli.options import (
    Data,
    Device,
    Exclude,
    Groups,
    HFModel,
    Memory,
    Method,
    Projection,
    SeqLen,
    StoreDtype,
    Target,
    TextField,
    TrustRemoteCode,
    Unneeded,
    method_of,
    path_option,
    source_of,
)
from unde.cli.project import Project
from unde.index import Index
from unde.integrations.source import Source


def build(
    out: Annotated[
        Path,
        path_option("--out", help="folder for the index; a half-built one is finished"),
    ],
    target: Target = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    seq_len: SeqLen = None,
    trust_remote_code: TrustRemoteCode = False,
    method: Method = "trak",
    projection: Projection = None,
    groups: Groups = "layer",
    exclude: Exclude = None,
    batch_size: Unneeded = None,
    num_workers: Annotated[int, typer.Option(help="processes that read the data")] = 0,
    engine: Annotated[
        str, typer.Option(help="who computes: serial, or processes:4; the bytes are the same")
    ] = "serial",
    device: Device = None,
    store_dtype: StoreDtype = "float32",
    memory: Memory = "2GB",
    seed: Annotated[int, typer.Option(help="of the random projection")] = 0,
    on_bad: Annotated[str, typer.Option(help="NaN gradients: error, or skip and record")] = "error",
) -> None:
    """Compute the gradient features of the training data.

    `unde plan` takes the same options, and says what this will need.

    Examples:

    `unde build --hf-model ./my-gpt2 --data train.jsonl --seq-len 512 --out runs/idx`

    `unde build my_project.setup:make --out runs/idx --method logra --projection "kron(64)"`
    """
    chosen = method_of(method, projection)
    project = Project(
        target, source_of(hf_model, data, text_field, seq_len, trust_remote_code), device=device
    )
    setup = project.setup
    index = Index.build(
        setup.model,
        setup.task,
        setup.train_data,
        out,
        method=chosen,
        groups=groups,
        exclude=exclude or (),
        collate=setup.collate,
        ids=setup.ids,
        batch_size=batch_size,
        recipe=project.recipe,
        executor=engine,
        num_workers=num_workers,
        store_dtype=store_dtype,
        memory=memory,
        seed=seed,
        on_bad=on_bad,
    )
    (project.source or Source(target=target)).remember(out)
    console.echo(f"{out}: {len(index):,} examples in {len(index.groups)} groups")
