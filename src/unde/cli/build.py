"""`unde build` and `unde finish`: write the gradient features of the training data to disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unde import console
from unde.cli import completion
from unde.cli.config import Config, write_config
from unde.cli.options import (
    BatchSize,
    ClusterOptions,
    Exclude,
    GroupsName,
    Memory,
    MethodName,
    Projection,
    StoreDtype,
    TrainingOptions,
    build_method,
    place_option,
)
from unde.store.remote import StorePath, place

if TYPE_CHECKING:
    from unde.cli.project import Project
    from unde.index import Index


def build(
    context: typer.Context,
    out: Annotated[
        Any, place_option("--out", help="folder or URL for the index; a half-built one is finished")
    ],
    model: TrainingOptions,
    cluster: ClusterOptions,
    method: MethodName = "trak",
    projection: Projection = None,
    groups: GroupsName = "layer",
    exclude: Exclude = None,
    batch_size: BatchSize = None,
    num_workers: Annotated[int, typer.Option(help="processes that read the data")] = 0,
    store_dtype: StoreDtype = "auto",
    memory: Memory = "2GB",
    seed: Annotated[int, typer.Option(help="seed of the random projection")] = 0,
    on_bad: Annotated[str, typer.Option(help="NaN gradients: error, or skip and record")] = "error",
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="3/64",
            help="which worker of how many, for array (default: from SLURM, PBS or torchrun)",
        ),
    ] = None,
    config: Config = None,
) -> None:
    """Compute the gradient features of the training data.

    `unde plan` takes the same options and estimates disk, memory and time.

    Examples:

    `unde build --hf-model ./my-gpt2 --data train.jsonl --seq-len 512 --out runs/idx`

    `unde build --hf-model ./run --checkpoints ./run --data chat.jsonl --method tracin --out runs/idx`

    `unde build my_project.setup:make --out runs/idx --method logra --projection "kron(64)"`

    `unde build --config runs/idx/run.toml --out runs/again`

    `unde build my_project.setup:make --out runs/idx --engine ray --workers 8 --gpus 1 --threads 4 --device cuda`

    `unde build my_project.setup:make --out runs/idx --engine array --worker 3/64`, and when all have ended
    `unde finish runs/idx`
    """
    from unde.cli.project import Project
    from unde.index import Index
    from unde.methods import TracIn

    executor = cluster.executor(worker)
    chosen = build_method(method, projection)
    project = Project(model)
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
        executor=executor,
        threads=cluster.threads,
        device=model.device,
        num_workers=num_workers,
        store_dtype=store_dtype,
        memory=memory,
        seed=seed,
        on_bad=on_bad,
    )
    index.close()
    project.memory.save(out)
    settings = context.params | _resolved(project, index)
    write_config(out, {p.name: settings[p.name] for p in context.command.params if p.name in settings})
    console.echo(_summary(index, out))


def finish(
    index: Annotated[
        Any,
        typer.Argument(
            parser=place,
            metavar="DIR",
            help="folder or URL of an unfinished index",
            autocompletion=completion.indexes,
        ),
    ],
    model: TrainingOptions,
    cluster: ClusterOptions,
    memory: Memory = "2GB",
) -> None:
    """Finish an index with the settings of its build, and check all of it.

    Run it when all workers of an array have ended. It computes the shards that are missing.

    Examples:

    `unde finish runs/idx`

    `unde finish runs/idx --engine processes:4`
    """
    from unde.cli.project import Project
    from unde.index import Index

    project = Project(model.remembered(index), index=index)
    setup = project.setup
    complete = Index.finish(
        index,
        setup.model,
        setup.task,
        setup.train_data,
        checkpoints=project.checkpoints,
        collate=setup.collate,
        ids=setup.ids,
        device=model.device,
        memory=memory,
        executor=cluster.executor(),
        recipe=project.recipe,
    )
    complete.close()
    console.echo(_summary(complete, index))


def _resolved(project: Project, index: Index) -> dict[str, Any]:
    """Options whose value the build chose, or whose meaning depends on the working directory."""
    options = project.memory.absolute()
    options["hf_model"] = options.pop("model")
    m = index.manifest
    chosen = {"projection": str(index.method.projection), "threads": m.resolved.threads}
    return options | chosen | {"store_dtype": m.store_dtype}


def _summary(index: Index, out: StorePath) -> str:
    if index.unfinished:
        return (
            f"{out}: this worker has done its share; {console.counted(index.unfinished, 'shard')} not written yet when "
            f"it ended. When all workers have ended: unde finish {out}"
        )
    return f"{out}: {console.counted(len(index), 'example')} in {console.counted(len(index.groups), 'group')}"
