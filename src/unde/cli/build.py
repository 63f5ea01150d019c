"""`unde build`: the gradient features of the training data, on disk."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unde import console
from unde.cli.config import Config, write_config
from unde.cli.options import (
    Address,
    Checkpoints,
    Data,
    Device,
    Engine,
    Exclude,
    Gpus,
    Groups,
    HFModel,
    Memory,
    Method,
    PassSize,
    Projection,
    SeqLen,
    StoreDtype,
    Target,
    TargetField,
    TextField,
    Threads,
    Timeout,
    TrustRemoteCode,
    Worker,
    Workers,
    method_of,
    place_option,
    source_of,
)
from unde.cli.project import Project
from unde.index import Index
from unde.methods import TracIn
from unde.parallel import named
from unde.store.remote import StorePath


def build(
    context: typer.Context,
    out: Annotated[
        Any, place_option("--out", help="folder or URL for the index; a half-built one is finished")
    ],
    target: Target = None,
    hf_model: HFModel = None,
    data: Data = None,
    text_field: TextField = None,
    target_field: TargetField = None,
    seq_len: SeqLen = None,
    trust_remote_code: TrustRemoteCode = False,
    method: Method = "trak",
    projection: Projection = None,
    groups: Groups = "layer",
    exclude: Exclude = None,
    checkpoints: Checkpoints = None,
    batch_size: PassSize = None,
    num_workers: Annotated[int, typer.Option(help="processes that read the data")] = 0,
    device: Device = None,
    store_dtype: StoreDtype = "auto",
    memory: Memory = "2GB",
    seed: Annotated[int, typer.Option(help="of the random projection")] = 0,
    on_bad: Annotated[str, typer.Option(help="NaN gradients: error, or skip and record")] = "error",
    engine: Engine = "serial",
    threads: Threads = None,
    workers: Workers = None,
    worker: Worker = None,
    gpus: Gpus = 0,
    address: Address = None,
    timeout: Timeout = None,
    config: Config = None,
) -> None:
    """Compute the gradient features of the training data.

    `unde plan` takes the same options, and says what this will need.

    Examples:

    `unde build --hf-model ./my-gpt2 --data train.jsonl --seq-len 512 --out runs/idx`

    `unde build --hf-model ./run --checkpoints ./run --data chat.jsonl --method tracin --out runs/idx`

    `unde build my_project.setup:make --out runs/idx --method logra --projection "kron(64)"`

    `unde build --config runs/idx/run.toml --out runs/again`

    `unde build my_project.setup:make --out runs/idx --engine ray --workers 8 --gpus 1 --threads 4 --device cuda`

    `unde build my_project.setup:make --out runs/idx --engine array --worker 3/64`, and when all have ended
    `unde finish runs/idx`
    """
    runs = named(
        engine, threads=threads, workers=workers, worker=worker, gpus=gpus, address=address, timeout=timeout
    )
    chosen = method_of(method, projection)
    project = Project(
        target,
        source_of(hf_model, data, text_field, seq_len, trust_remote_code, target_field, checkpoints),
        device=device,
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
        checkpoints=project.checkpoints,
        checkpoint_weights=project.rates if isinstance(chosen, TracIn) and project.rates else project.shares,
        collate=setup.collate,
        ids=setup.ids,
        batch_size=batch_size,
        recipe=project.recipe,
        executor=runs,
        threads=threads,
        device=device,
        num_workers=num_workers,
        store_dtype=store_dtype,
        memory=memory,
        seed=seed,
        on_bad=on_bad,
    )
    index.close()
    project.remembered.remember(out)
    settings = context.params | _settled(project, index)
    write_config(out, {p.name: settings[p.name] for p in context.command.params if p.name in settings})
    console.echo(said(index, out))


def _settled(project: Project, index: Index) -> dict[str, Any]:
    """What became of options that were not said, or that mean something else elsewhere."""
    noted = project.remembered.lasting()
    noted["hf_model"] = noted.pop("model")
    m = index.manifest
    settled = {"projection": str(index.method.projection), "threads": m.settled.threads}
    return noted | settled | {"store_dtype": m.store_dtype}


def said(index: Index, out: StorePath) -> str:
    """What is there now."""
    if index.unfinished:
        return (
            f"{out}: this worker has done its share; {console.counted(index.unfinished, 'shard')} not written yet when "
            "it ended. "
            f"When all workers have ended: unde finish {out}"
        )
    return f"{out}: {console.counted(len(index), 'example')} in {console.counted(len(index.groups), 'group')}"
