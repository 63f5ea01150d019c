"""A Hugging Face language model that is no more than its config: shapes, and no weights or texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unde.errors import UndeError
from unde.integrations import model_types as kinds
from unde.integrations.language import asks_to_run_code
from unde.tasks import MultiLabel, Regression, Task
from unde.tasks.tokens import limits


def planned(
    path: Path, length: int, trust_remote_code: bool = False
) -> tuple[nn.Module, Task, dict[str, Any]]:
    """The model of a config, the task that it is trained on, and what `Index.plan` takes for its examples of `length`
    tokens, source and target alike: nothing but shapes."""
    model = model_of_config(path, trust_remote_code)
    kind = kinds.kind_of_model(model)
    task = kinds.task_for(kind, model, None)
    if kind is kinds.CAUSAL:
        return model, task, {"seq_len": length}
    context = limits(model)[1]
    if not 2 <= length <= context:
        raise UndeError(
            f"--seq-len {length}: expected 2 to {context}, the most that the model reads"
            if length > context
            else f"--seq-len {length}: expected at least 2 tokens"
        )
    tokens = _empty(1, length)
    outputs = getattr(model.config, "num_labels", 1)
    shapes = {MultiLabel: (1, outputs), Regression: (1, outputs)}
    if kind is kinds.SEQUENCE:
        shape = shapes.get(type(task), (1,))
        labels = _empty(*shape, dtype=torch.float32 if type(task) in shapes else torch.long)
    else:
        labels = torch.empty_like(tokens)
    return model, task, {"example": {"input_ids": tokens, "labels": labels}}


def _empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def model_of_config(path: Path, trust_remote_code: bool = False) -> Any:
    """The model of a config.json, or of the folder that holds it, as the class that the config names, on the meta
    device."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UndeError(
            f"{file} does not exist: expected the config.json of a Hugging Face model, or the folder that holds "
            "it. Nothing is downloaded; save one with config.save_pretrained(folder)"
        )
    try:
        import transformers
    except ImportError:
        raise UndeError("--hf-config needs transformers: install it with pip install 'unde[hf]'") from None
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            auto = getattr(transformers, f"AutoModelFor{kinds.kind_of(config).auto}")
            return auto.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as e:
        if not trust_remote_code and "trust_remote_code" in str(e):
            raise asks_to_run_code(str(file)) from None
        first = str(e).strip().partition("\n")[0]
        raise UndeError(
            f"no language model can be made from {file} ({first}): for other models, plan with "
            "MODULE:FUNCTION"
        ) from None
