"""Robots: LoRA fine-tuned on 600 pictures with known contributors, and the pictures it generates."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

import experiments.shared.pictures as pictures
from experiments.datasets import Attributes
from experiments.datasets import robots as draw
from experiments.shared import models
from experiments.shared.denoising import training as described
from unde.diffusion import Samples
from unde.evaluate import TrainingSpec

N = 600
STEPS, LR = 260, 2e-3  # steps for half of the pictures
GROUPS = "tensor"  # each matrix of LoRA


to_pixels, from_pixels = pictures.to_pixels, pictures.to_latents


@cache
def data() -> Attributes:
    return draw(32)


@cache
def columns() -> dict[str, Tensor]:
    conditions = pictures.encode(data().prompts)
    return {"latents": pictures.encode_pictures(data().images), "encoder_hidden_states": conditions}


def train(rows: np.ndarray | None = None, seed: int = 0) -> UNet2DConditionModel:
    """On all pictures, or on some; always as many steps for each picture."""
    chosen = torch.arange(N) if rows is None else torch.from_numpy(rows)
    x, told = (v[chosen] for v in columns().values())
    return pictures.finetuned(x, told, steps=STEPS * len(chosen) * 2 // N, seed=seed, lr=LR)


def training() -> TrainingSpec:
    return described(_initial, _training_pictures, steps=STEPS, lr=LR, nothing=pictures.nothing())


def _initial(seed: int) -> UNet2DConditionModel:
    return pictures.with_lora()


def _training_pictures() -> dict[str, Tensor]:
    given = columns()
    return {"x": given["latents"], "conditions": given["encoder_hidden_states"]}


@cache
def attributed() -> UNet2DConditionModel:
    """Fine-tuned on all pictures once; the adapter is kept in models/."""
    return models.attributed("robots", pictures.with_lora, train)


@cache
def queries(role: str) -> Samples:
    return pictures.random_queries(attributed(), data(), role)
