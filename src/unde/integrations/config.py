"""A Hugging Face language model that is no more than its config: shapes, and no weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from unde.errors import UndeError
from unde.integrations.language import asks_to_run_code


def model_of_config(path: Path, trust_remote_code: bool = False) -> nn.Module:
    """The causal language model of a config.json, or of the folder that holds it, on the meta device."""
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
        config = AutoConfig.from_pretrained(
            str(file), local_files_only=True, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as e:
        if not trust_remote_code and "trust_remote_code" in str(e):
            raise asks_to_run_code(str(file)) from None
        first = str(e).strip().partition("\n")[0]
        raise UndeError(
            f"no causal language model can be made from {file} ({first}): for other models, plan with "
            "MODULE:FUNCTION"
        ) from None
