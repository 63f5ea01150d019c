"""Robots once more: LoRA on half of the pictures, always from the same start.

The pictures are those of `robots`. A seed fixes the order of all 600 pictures in each epoch, and the timestep and noise
of each picture there; training on some of them leaves the others out of that order. Each half of the bank has a seed of
its own, so its models differ by their order, too.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from experiments.shared import models, pictures, robots
from experiments.shared.banks import Recipe
from experiments.shared.denoising import TIMESTEPS, alphas, learning_rate, simple_loss, utilities
from unde.diffusion import Samples

N, GROUPS = robots.N, robots.GROUPS
EPOCHS, BATCH_SIZE, LR = 12, 16, 1e-3
JUDGED = 50  # timesteps at which a model is judged
columns = robots.columns
to_pixels, from_pixels = robots.to_pixels, robots.from_pixels


def train(rows: np.ndarray, seed: int) -> UNet2DConditionModel:
    """LoRA on the pretrained model, trained on some of the pictures."""
    model = pictures.with_lora()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=1e-6)
    chosen = torch.zeros(N, dtype=torch.bool)
    chosen[torch.from_numpy(rows)] = True
    steps = list(_steps(chosen, seed))
    schedule = learning_rate(optimizer, len(steps))
    model.train()
    for batch in steps:
        optimizer.zero_grad()
        simple_loss(model, batch).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def _steps(chosen: Tensor, seed: int) -> list[dict[str, Tensor]]:
    """The batches of the chosen pictures, with noise, in the order of the seed."""
    data, epochs = columns(), []
    for epoch in range(EPOCHS):
        random = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(N, generator=random)
        t = torch.randint(TIMESTEPS, (N,), generator=random)
        noise = torch.randn(data["latents"].shape, generator=random)
        drop = torch.rand(N, generator=random) < 0.1  # for guidance
        a = alphas()[t].view(-1, 1, 1, 1)
        x, text = data["latents"], data["encoder_hidden_states"]
        made = {
            "x": a.sqrt() * x + (1 - a).sqrt() * noise,
            "v": a.sqrt() * noise - (1 - a).sqrt() * x,
            "t": t,
            "conditions": torch.where(drop.view(-1, 1, 1), pictures.nothing(), text),
        }
        epochs.append({name: v[order[chosen[order]]] for name, v in made.items()})
    joined = {name: torch.cat([e[name] for e in epochs]).split(BATCH_SIZE) for name in epochs[0]}
    return [dict(zip(joined, parts, strict=True)) for parts in zip(*joined.values(), strict=True)]


@cache
def attributed() -> UNet2DConditionModel:
    """Fine-tuned on all pictures once; the adapter is kept in models/."""
    return models.attributed("robots-finetuned", pictures.with_lora, lambda: train(np.arange(N), 0))


@cache
def queries(role: str) -> Samples:
    return pictures.random_queries(attributed(), robots.data(), role)


def utility(model: UNet2DConditionModel) -> dict[str, Tensor]:
    return {role: utilities(model, queries(role).queries(), JUDGED) for role in ("learn", "eval")}


def recipe() -> Recipe:
    return Recipe(
        name="LoRA on half of 600 pictures of robots, from one start",
        train=train,
        utility=utility,
        n_train=N,
        subsets=32,
    )
