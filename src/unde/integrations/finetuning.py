"""How a Hugging Face model was fine-tuned, as a TrainingSpec that a calibration can repeat on halves of the data."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from unde import console
from unde.data import choose_collate
from unde.errors import UndeError
from unde.evaluate import TrainingSpec
from unde.integrations.language import load_model
from unde.integrations.trainer import STATE, explain_state, read_state
from unde.setup import Setup
from unde.store.files import read_json

_ADAPTER, _CONFIG = "adapter_config.json", "config.json"


@dataclass(frozen=True)
class Arguments:
    """The arguments of a fine-tuning; the defaults are those of transformers.Trainer."""

    epochs: float = 3.0
    lr: float = 5e-5
    batch_size: int = 8
    clip: float = 1.0

    def __str__(self) -> str:
        return f"{self.epochs:g} epochs of AdamW at {self.lr:g}, batches of {self.batch_size}, linear decay"


def fine_tuning(
    setup: Setup,
    model: str,
    *,
    base: str | None = None,
    epochs: float | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    local: bool = False,
    itself: bool = False,
    trust_remote_code: bool = False,
) -> TrainingSpec:
    """The fine-tuning of a Hugging Face model, from its base checkpoint.

    Args:
        setup: What `hf_setup` gave for the model.
        model: The folder of the model, of an adapter, or of a checkpoint of Trainer.
        base: The checkpoint that fine-tuning started from; adapters name theirs, and so may a config.
        epochs: Passes over the data; like `lr` and `batch_size` by default as Trainer has recorded it beside the model,
            or else Trainer's own default.
        lr: The learning rate at the start.
        batch_size: Examples in a step, over all devices and accumulation steps.
        local: Whether the training continues from the final model: then no base is needed.
        itself: Whether `base` may be the model itself, which is then trained further on other data.
        trust_remote_code: Whether code that comes with the base is run.

    Raises:
        UndeError: If the checkpoint that fine-tuning started from is not known.
    """
    folder = Path(model)
    arguments = read_arguments(folder, len(setup.rows(setup.train_data)))
    options = {"epochs": epochs, "lr": lr, "batch_size": batch_size}
    arguments = replace(arguments, **{name: value for name, value in options.items() if value is not None})
    start = None if local else _start(folder, base, itself, trust_remote_code)
    console.note(f"training: {arguments}" + ("" if start is None else f", from {start.base}"))
    return TrainingSpec(
        model=start or _unused,
        data=setup.train_data,
        loss=setup.task.loss,
        optimizer=partial(torch.optim.AdamW, lr=arguments.lr, weight_decay=0.0),
        schedule=_linear_decay,
        clip=arguments.clip,
        epochs=max(1, math.ceil(arguments.epochs)),
        batch_size=arguments.batch_size,
        collate=setup.collate or choose_collate(setup.task.collate, setup.train_data),
    )


def read_arguments(folder: Path, examples: int) -> Arguments:
    """What Trainer has recorded in trainer_state.json beside a checkpoint; its defaults where there is none.

    The size of a batch follows from the number of steps, so that devices and accumulation are counted. Pickled
    arguments (training_args.bin) are not read.
    """
    defaults = Arguments()
    path = folder / STATE
    if not path.is_file():
        return defaults
    state, rates = read_state(path)
    with explain_state(path):
        epochs, steps = float(state["num_train_epochs"]), int(state["max_steps"])
    batch = max(1, round(examples * epochs / steps)) if steps > 0 else defaults.batch_size
    return Arguments(epochs or defaults.epochs, first_rate(rates) or defaults.lr, batch)


def first_rate(rates: Mapping[int, float]) -> float | None:
    """The learning rate that a training began with, from what it logged by step; None if it logged nothing.

    A rate that falls from the first log on is followed back to the start; else it is the largest one.

    >>> first_rate({2: 0.8, 4: 0.6}), first_rate({1: 0.1, 2: 0.5, 3: 0.4}), first_rate({})
    (1.0, 0.5, None)
    """
    if not rates:
        return None
    (first, rate), *rest = sorted(rates.items())
    if not rest or rest[0][1] >= rate:
        return max(rates.values())
    second, lower = rest[0]
    return rate + (rate - lower) * first / (second - first)


@dataclass(frozen=True)
class BaseModel:
    """Makes the model as it was before fine-tuning: the base checkpoint, with a fresh adapter if there is one."""

    base: str
    adapter: str | None = None
    trust_remote_code: bool = False

    def __call__(self, seed: int) -> nn.Module:
        model: Any = load_model(self.base, self.trust_remote_code)
        if self.adapter is None:
            return model
        import peft

        config = peft.PeftConfig.from_pretrained(self.adapter)
        config.inference_mode = False
        return peft.get_peft_model(model, config)


def _start(folder: Path, base: str | None, itself: bool, trust_remote_code: bool) -> BaseModel:
    adapter, start = folder / _ADAPTER, base
    if start is None:
        key = "base_model_name_or_path" if adapter.is_file() else "_name_or_path"
        with suppress(OSError, ValueError, AttributeError):
            start = read_json(adapter if adapter.is_file() else folder / _CONFIG, follow=True).get(key)
    start = start if isinstance(start, str) and start else None
    same = start is not None and Path(start).is_dir() and Path(start).resolve() == folder.resolve()
    if base is not None and same and not itself:
        raise UndeError(
            f"--base {base} is the model itself: name the checkpoint that its fine-tuning started from"
        )
    known = start is not None and (Path(start).expanduser().is_dir() or adapter.is_file() or base)
    if start is None or not known or (same and base is None):
        raise UndeError(
            f"there is no way to train: {folder} does not say which checkpoint its fine-tuning started from. Name it "
            "(--base DIR); unde calibrate can also continue from the model as it is (--how local)"
        )
    return BaseModel(os.path.expanduser(start), str(folder) if adapter.is_file() else None, trust_remote_code)


def _linear_decay(optimizer: Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / max(1, steps)))


def _unused(seed: int) -> nn.Module:  # noqa: ARG001
    raise UndeError("a continued training starts from the final model")
