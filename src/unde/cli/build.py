"""`unde build`, `finish`, `plan` and `bench`: the features of the training data on disk, and what they cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unde import console
from unde.cli.config import Config, name_flags, write_config
from unde.cli.options import (
    METHODS,
    ClusterOptions,
    FeatureOptions,
    Memory,
    ModelOptions,
    TrainingOptions,
    check_format,
    hf_option,
    indexes,
    local_path,
    option,
    place_option,
)
from unde.errors import UndeError
from unde.store.remote import StorePath, place

if TYPE_CHECKING:
    from unde.cli.project import Project
    from unde.index import Index


def build(
    context: typer.Context,
    out: Annotated[Any, place_option("folder or URL for the index; a half-built one is finished", "--out")],
    model: TrainingOptions,
    features: FeatureOptions,
    cluster: ClusterOptions,
    num_workers: Annotated[int, option("processes that read the data")] = 0,
    seed: Annotated[int, option("seed of the random projection")] = 0,
    on_bad: Annotated[str, option("NaN gradients: error, or skip and record")] = "error",
    worker: Annotated[
        str | None,
        option("which worker of how many, for array (default: from SLURM, PBS or torchrun)", metavar="3/64"),
    ] = None,
    second_moments: Annotated[
        bool,
        option(
            "compare gradients in the metric of Adam, by what a recorder kept in --checkpoints",
            "--second-moments",
        ),
    ] = False,
    overwrite: Annotated[
        bool, option("replace an index in --out of other data or settings", "--overwrite")
    ] = False,
    config: Config = None,
) -> None:
    """Build an index: compute the gradient features of every training example and store them.

    Ask about it with `unde attribute`, `unde report` or `unde serve`, which need --index alone. `unde plan` takes the
    same options and estimates disk, memory and time. An interrupted build resumes.

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
    from unde.methods import AUTO, TracIn, parse

    executor = cluster.executor(worker)
    method = features.method if features.method == AUTO else parse(features.method)
    moments = _recorded_moments(model.checkpoints) if second_moments else None
    project = Project(model)
    setup = project.setup
    index = Index.build(
        setup.model,
        setup.task,
        setup.train_data,
        out,
        ids=setup.ids,
        checkpoint_weights=project.rates if isinstance(method, TracIn) and project.rates else project.shares,
        executor=executor,
        threads=cluster.threads,
        num_workers=num_workers,
        seed=seed,
        on_bad=on_bad,
        second_moments=moments,
        overwrite=overwrite,
        **project.arguments,
        **(features.arguments | {"method": method}),
    )
    index.close()
    project.memory.save(out)
    settings = context.params | _resolved(project, index, features.method)
    write_config(out, {p.name: settings[p.name] for p in context.command.params if p.name in settings})
    console.echo(_summary(index, out))


def _recorded_moments(checkpoints: str | None) -> Any:
    from unde.integrations.training import read_record

    if checkpoints is None:
        raise UndeError("--second-moments without --checkpoints DIR: name the folder of a recorder")
    moments = read_record(checkpoints).second_moments
    if moments is None:
        raise UndeError(
            f"{checkpoints} holds no second moments: expected those of Adam or alike, as Recorder and "
            "CheckpointRecorder keep them"
        )
    return moments


def finish(
    index: Annotated[
        Any,
        typer.Argument(
            parser=place, metavar="DIR", help="folder or URL of an unfinished index", autocompletion=indexes
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
        ids=setup.ids,
        memory=memory,
        executor=cluster.executor(),
        **project.arguments,
    )
    complete.close()
    console.echo(_summary(complete, index))


def _resolved(project: Project, index: Index, method: str) -> dict[str, Any]:
    """Options whose value the build chose, or whose meaning depends on the working directory."""
    options = project.memory.absolute()
    options["hf_model"] = options.pop("model")
    m = index.manifest
    chosen = {"projection": str(index.method.projection), "threads": m.resolved.threads}
    if method == "auto" and index.method.name in METHODS:
        chosen["method"] = index.method.name
    return options | chosen | {"store_dtype": m.store_dtype}


def _summary(index: Index, out: StorePath) -> str:
    if index.unfinished:
        return (
            f"{out}: this worker has done its share; {console.counted(index.unfinished, 'shard')} not written yet when "
            f"it ended. When all workers have ended: unde finish {out}"
        )
    return f"{out}: {console.counted(len(index), 'example')} in {console.counted(len(index.groups), 'group')}"


def plan(
    context: typer.Context,
    model: TrainingOptions,
    features: FeatureOptions,
    hf_config: Annotated[
        Path | None,
        hf_option(
            "config.json of a model, or its folder, where there are no weights and no data yet: bytes on disk "
            "alone; give --examples",
            metavar="FILE",
            parser=local_path,
        ),
    ] = None,
    examples: Annotated[int | None, option("training examples (default: those of the data)", min=1)] = None,
    workers: Annotated[
        int, option("processes or machines that build, each as fast as this one", metavar="N")
    ] = 1,
    format: Annotated[str, option("table or json")] = "table",
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
        collate=collate,
        checkpoints=1 if count is None else count,
        workers=workers,
        **features.arguments,
    )
    table = name_flags(str(result), context.command)
    console.echo(json.dumps(result.as_dict(), indent=1) if format == "json" else table)


def bench(
    model: ModelOptions,
    rank: Annotated[int, option("rank of the two-sided projection")] = 16,
    batch_size: Annotated[int, option("examples in one pass; fewer need less memory")] = 32,
    runs: Annotated[int, option("how often each is timed, in turns")] = 15,
) -> None:
    """Measure the cost of features on your model, as a ratio to one plain training pass.

    Example: `unde bench my_project.setup:make --rank 16`, or with --hf-model and --data
    """
    from unde.bench import measure
    from unde.cli.project import Project

    console.echo(measure(Project(model).setup, rank=rank, batch_size=batch_size, runs=runs))
