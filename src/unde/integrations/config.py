"""Hugging Face language models made from a config alone, without weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from unde.errors import UndeError
from unde.integrations import model_types as kinds
from unde.integrations.language import asks_to_run_code
from unde.tasks import Task


def model_of_config(path: Path, trust_remote_code: bool = False) -> tuple[nn.Module, Task]:
    """The model of a config.json or of the folder that holds it, on the meta device, and the task it is trained on."""
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
            model = auto.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as e:
        if not trust_remote_code and "trust_remote_code" in str(e):
            raise asks_to_run_code(str(file)) from None
        first = str(e).strip().partition("\n")[0]
        raise UndeError(
            f"no language model can be made from {file} ({first}): for other models, plan with "
            "MODULE:FUNCTION"
        ) from None
    return model, kinds.task_for(kinds.kind_of_model(model), model, None)
