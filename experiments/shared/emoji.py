"""Emoji: LoRA fine-tuned on pictures that show a category of every attribute; real pictures are held out as queries."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

import experiments.shared.pictures as pictures
from experiments.datasets import Attributes
from experiments.datasets import emoji as read
from experiments.shared import models
from experiments.shared.paths import data_folder
from unde.diffusion import Samples

HELD_OUT = 50  # combinations of each split
EPOCHS, LR = 8, 2e-3
GROUPS = "tensor"


@cache
def _parts() -> tuple[Attributes, dict[str, Attributes]]:
    rest = read(data_folder("emoji_subject_style_background_32.npz"))
    held = {}
    for split in ("train", "validation"):
        rest, held[split] = rest.hold_out(HELD_OUT, split)
    return rest, held


def data() -> Attributes:
    return _parts()[0]


def held_out(split: str) -> Attributes:
    """Pictures of combinations that no training picture shows."""
    return _parts()[1][split]


def as_columns(those: Attributes) -> dict[str, Tensor]:
    return {
        "latents": pictures.encode_pictures(those.images),
        "encoder_hidden_states": pictures.encode(those.prompts),
    }


@cache
def columns() -> dict[str, Tensor]:
    return as_columns(data())


def train() -> UNet2DConditionModel:
    """Each picture with its whole caption, and as often with one that names a single attribute."""
    random = np.random.default_rng(0)
    names = list(data().categories)
    single = []
    for i in range(len(data())):
        attribute = names[random.integers(len(names))]
        single.append(data().prompt(**{attribute: int(data().labels[attribute][i])}))
    x, told = columns().values()
    x, told = torch.cat([x, x]), torch.cat([told, pictures.encode(single)])
    return pictures.finetuned(x, told, steps=EPOCHS * len(x) // 16, seed=0, lr=LR)


@cache
def attributed() -> UNet2DConditionModel:
    return models.attributed("emoji", pictures.with_lora, train)


@cache
def queries(role: str) -> Samples:
    return pictures.random_queries(attributed(), data(), role)
