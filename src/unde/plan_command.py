"""`unde plan`: what a run will need, before anything is paid for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unde.errors import UndeError, unknown

if TYPE_CHECKING:
    from torch import nn


def plan(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:FUNCTION]", help="a function that returns an unde.Setup"),
    ] = None,
    hf_config: Annotated[
        Path | None,
        typer.Option(help="config.json of a Hugging Face language model, or its folder; no weights needed"),
    ] = None,
    examples: Annotated[
        int | None, typer.Option(help="training examples (default: those of the setup)")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="tokens of an example of a language model")] = None,
    method: Annotated[str, typer.Option(help="tracin, trak, logra, ekfac, …")] = "logra",
    projection: Annotated[
        str, typer.Option(help="kron(16), pca(16), sjlt(4096), dense(512) or none")
    ] = "kron(16)",
    groups: Annotated[str, typer.Option(help="layer, tensor or consecutive(128)")] = "layer",
    exclude: Annotated[
        list[str] | None, typer.Option(help="regex of parameters to leave out; repeatable")
    ] = None,
    batch_size: int = 32,
    store_dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16")] = "float32",
    checkpoints: Annotated[int, typer.Option(help="how many")] = 1,
    queries: Annotated[int, typer.Option(help="how many to score and to learn weights on")] = 100,
    memory: Annotated[str, typer.Option(help="budget for blocks")] = "2GB",
    format: Annotated[str, typer.Option(help="table or json")] = "table",
) -> None:
    """Say what an index will need: features, disk, memory by stage, operations relative to training.

    Nothing is computed and nothing downloaded: the model runs on shapes alone.

    Example: `unde plan --hf-config my_model/ --examples 100000 --seq-len 512 --projection "kron(16)"`

    Example: `unde plan my_project.setup:make --batch-size 16`
    """
    from unde import methods
    from unde.data import Rows
    from unde.planning import plan as make_plan
    from unde.tasks import CausalLM

    if format not in ("table", "json"):
        raise unknown("format", format, ("table", "json"))
    if (target is None) == (hf_config is None):
        raise UndeError(
            "expected one of two things to plan for: MODULE:FUNCTION of a setup, or --hf-config with the config of "
            "a Hugging Face language model"
        )
    example: Any = None
    if target is None:
        assert hf_config is not None
        for name, value in (("--examples", examples), ("--seq-len", seq_len)):
            if value is None:
                raise UndeError(f"{name} is missing: a config does not say how much data there will be")
        model, task = model_on_meta(hf_config), CausalLM()
    else:
        from unde.project import load

        setup = load(target)
        model, task = setup.model, setup.task
        rows = Rows(setup.train_data, setup.collate or task.collate)
        examples = len(rows) if examples is None else examples
        if seq_len is None:
            example = rows.batch(range(min(batch_size, len(rows))))
    made = make_plan(
        model,
        task,
        example,
        n_examples=examples or 0,
        seq_len=seq_len,
        method=replace(methods.parse(method), projection=projection),
        groups=groups,
        exclude=exclude or (),
        batch_size=batch_size,
        store_dtype=store_dtype,
        checkpoints=checkpoints,
        queries=queries,
        memory=memory,
    )
    typer.echo(json.dumps(made.as_dict(), indent=1) if format == "json" else str(made))


def model_on_meta(path: Path) -> nn.Module:
    """The causal language model of a config, without weights."""
    import torch

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UndeError(
            f"{file} does not exist: expected the config.json of a Hugging Face model, or the folder that holds "
            "it. Nothing is downloaded; save one with config.save_pretrained(folder)"
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UndeError("--hf-config needs transformers: install it with pip install 'unde[hf]'") from None
    try:
        config = AutoConfig.from_pretrained(str(file), local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, ImportError) as e:
        first = str(e).strip().partition("\n")[0]
        raise UndeError(
            f"no causal language model can be made from {file} ({first}): for other models, plan with "
            "MODULE:FUNCTION"
        ) from None
