"""Folders that transformers.Trainer writes: the newest checkpoint as a model, all of them for TracInCP."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from unde import console
from unde.checkpoints import Checkpoint
from unde.errors import UndeError, explain
from unde.integrations import require
from unde.store.files import check_plain, read_json

STATE = "trainer_state.json"  # the last file of a checkpoint that Trainer writes
_CONFIGS = ("config.json", "adapter_config.json")
_ADAPTER = "adapter_model.safetensors"
RECORDED = "checkpoints.json"  # of a CheckpointRecorder


def newest(folder: str) -> str:
    """The newest checkpoint in the folder of a run; other folders, and names on the hub, as they are."""
    path = Path(folder)
    if not path.is_dir() or any((path / name).exists() for name in _CONFIGS):
        return folder
    checkpoints = steps(path)
    if not checkpoints:
        return folder
    last = checkpoints[max(checkpoints)]
    console.note(f"using {last}, the newest of {console.counted(len(checkpoints), 'checkpoint')} in {folder}")
    return str(last)


def steps(folder: Path) -> dict[int, Path]:
    """Checkpoints by their steps; those that were not saved whole are left out."""
    whole = (
        p
        for p in folder.glob("checkpoint-*")
        if (p / STATE).is_file() and any((p / n).is_file() for n in _CONFIGS)
    )
    numbers = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in whole)
    return dict(sorted((int(number[1]), path) for number, path in numbers if number))


def home_of(checkpoint: str) -> Path | None:
    """The folder of the run that a checkpoint is part of."""
    path = Path(checkpoint)
    return path.absolute().parent if path.is_dir() and (path / STATE).is_file() else None


def checkpoints_in(folder: Path, model: nn.Module) -> tuple[list[Checkpoint], list[float] | None]:
    """Checkpoints for Index.build, and their learning rates where these are known.

    The folder is that of a run of Trainer (checkpoint-100, checkpoint-200, …), of a CheckpointRecorder, or one with
    a .safetensors file for each, in the order of their names.
    """
    if (folder / RECORDED).is_file():
        files, rates = recorded(folder)
        return list(files), rates
    checkpoints = steps(folder)
    if checkpoints:
        return [_weights(path, model) for path in checkpoints.values()], _rates(checkpoints)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UndeError(
            f"{folder} holds no checkpoint: expected folders checkpoint-100, checkpoint-200, … of Trainer, what a "
            "CheckpointRecorder wrote, or .safetensors files"
        )
    return list(files), None


def _weights(checkpoint: Path, model: nn.Module) -> Checkpoint:
    """The weights of one, which may be in several files, or be an adapter's alone."""
    if (checkpoint / _ADAPTER).is_file():
        return _with_adapter(checkpoint / _ADAPTER, model)
    files = sorted(checkpoint.glob("model*.safetensors"))
    if not files:
        raise UndeError(
            f"{checkpoint} holds no model.safetensors: pickles are never loaded. Train with save_safetensors"
        )
    return files[0] if len(files) == 1 else ShardedWeights(files)


class ShardedWeights(Mapping[str, Tensor]):
    """Tensors of several files, each read when it is asked for."""

    def __init__(self, files: list[Path]) -> None:
        self.where: dict[str, Path] = {}
        for file in files:
            with _open(file) as tensors:
                self.where |= dict.fromkeys(tensors.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        with _open(self.where[name]) as tensors:
            return tensors.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


def _open(file: Path) -> Any:
    with (
        explain(f"checkpoint {file} is damaged ({{e}})", SafetensorError),
        explain(f"cannot read the checkpoint {file} ({{why}})", OSError),
    ):
        check_plain(file, follow=True)
        return safe_open(file, framework="pt")


def _with_adapter(file: Path, model: nn.Module) -> dict[str, Tensor]:
    """The model's own weights with those of an adapter, whose files name them otherwise than the model does."""
    peft = require("peft", "peft")
    if not isinstance(model, peft.PeftModel):
        raise UndeError(f"{file} is an adapter, but the model has none: name the adapter as --hf-model")
    live = model.state_dict()
    place = {tensor.data_ptr(): name for name, tensor in live.items()}
    saved = {name: place[t.data_ptr()] for name, t in peft.get_peft_model_state_dict(model).items()}
    tensors = ShardedWeights([file])
    odd = sorted(set(saved) ^ set(tensors))
    if odd:
        raise UndeError(
            f"{file} does not fit the adapter of the model: {odd[0]!r} is in one of the two alone"
        )
    return live | {saved[name]: tensor for name, tensor in tensors.items()}


def _rates(checkpoints: dict[int, Path]) -> list[float] | None:
    """The learning rate at each checkpoint, interpolated between the steps that Trainer logged."""
    path = checkpoints[max(checkpoints)] / STATE
    _, rates = read_state(path)
    if not rates:
        console.note(f"{path} has no learning rate in its log: all checkpoints count the same")
        return None
    return np.interp(list(checkpoints), sorted(rates), [rates[s] for s in sorted(rates)]).tolist()


def read_state(path: Path) -> tuple[dict[str, Any], dict[int, float]]:
    """A trainer_state.json, and the learning rates that it logged by step."""
    with explain_state(path):
        state = read_json(path, follow=True)
        log = state["log_history"]
        return state, {int(e["step"]): float(e["learning_rate"]) for e in log if "learning_rate" in e}


def explain_state(path: Path) -> AbstractContextManager[None]:
    return explain(
        f"{path} is not what Trainer writes ({{kind}}: {{e}})", OSError, ValueError, TypeError, KeyError
    )


def recorded(folder: str | os.PathLike[str]) -> tuple[list[Path], list[float]]:
    """(checkpoints, checkpoint_weights) for Index.build, from what a CheckpointRecorder wrote."""
    folder = Path(folder).expanduser()
    entries = read_entries(folder)
    if not entries:
        raise UndeError(f"{folder} holds no recorded checkpoint: expected a folder of a CheckpointRecorder")
    return [folder / e["file"] for e in entries], [e["learning_rate"] for e in entries]


def read_entries(folder: Path) -> list[dict[str, Any]]:
    path = folder / RECORDED
    if not path.exists():
        return []
    message = f"{path} is not what a CheckpointRecorder writes: choose another folder"
    with explain(message, ValueError, TypeError, KeyError):
        entries = json.loads(path.read_text())
        return [{k: e[k] for k in ("step", "learning_rate", "file")} for e in entries]
