"""What the diffusion studies share: training of denoisers, how retrained ones are judged, and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch
from diffusers import DDPMScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from unde.evaluate import TrainingSpec
from unde.tasks import Diffusion

TIMESTEPS = 1000
AVERAGED = 10  # timesteps whose gradients are averaged in an index


def scheduler(clip: bool = True) -> DDPMScheduler:
    """The paper's, 1,000 steps and β from 1e-4 to 0.02; but models predict v, which short training learns better.

    Samplers clip what they predict to [−1, 1], unless it is latents.
    """
    return DDPMScheduler(TIMESTEPS, 1e-4, 0.02, prediction_type="v_prediction", clip_sample=clip)


def fit(
    model: nn.Module,
    images: Tensor,
    *,
    steps: int,
    seed: int,
    lr: float,
    batch_size: int = 16,
    conditions: Tensor | None = None,
    nothing: Tensor | None = None,
) -> nn.Module:
    """Trains what is trainable on the simple loss: AdamW, weight decay 1e-6, cosine after 10 % warm-up.

    The timesteps of a batch are drawn one from each of as many equal parts of the schedule, which makes the loss of a
    batch less noisy. A tenth of the `conditions` (N, tokens, width) are replaced by `nothing`, for guidance.
    """
    columns = {"x": images} | ({} if conditions is None else {"conditions": conditions})
    return training(lambda seed: model, columns, steps=steps, lr=lr, batch_size=batch_size, nothing=nothing)(
        np.arange(len(images)), seed
    )


def training(
    model: Callable[[int], nn.Module],
    data: dict[str, Tensor] | Callable[[], dict[str, Tensor]],
    *,
    steps: int,
    lr: float,
    batch_size: int = 16,
    nothing: Tensor | None = None,
) -> TrainingSpec:
    """As `fit`, described for a bank. `data` has the images as "x", and "conditions" if there are any."""
    return TrainingSpec(
        model=model,
        data=data,
        loss=simple_loss,
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=1e-6),
        schedule=learning_rate,
        prepare=partial(noised, nothing=nothing),
        order=partial(_batches, batch_size, steps),
    )


def noised(
    batch: dict[str, Tensor], random: torch.Generator, *, nothing: Tensor | None = None
) -> dict[str, Tensor]:
    x, count = batch["x"], len(batch["x"])
    part = TIMESTEPS / count
    t = (torch.arange(count) * part + torch.rand(count, generator=random) * part).long()
    noise = torch.randn(x.shape, generator=random)
    a = alphas()[t].view(-1, 1, 1, 1)
    made = {"x": a.sqrt() * x + (1 - a).sqrt() * noise, "t": t}
    if "conditions" in batch:
        drop = torch.rand(count, generator=random) < 0.1
        made["conditions"] = torch.where(drop.view(-1, 1, 1), nothing, batch["conditions"])
    return made | {"v": a.sqrt() * noise - (1 - a).sqrt() * x}


@cache
def alphas() -> Tensor:
    return scheduler().alphas_cumprod


def simple_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    given = {"encoder_hidden_states": batch["conditions"]} if "conditions" in batch else {}
    return (model(batch["x"], batch["t"], **given).sample - batch["v"]).square().mean()


def learning_rate(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, partial(_warm_then_cosine, steps))


def _warm_then_cosine(steps: int, step: int) -> float:
    return min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _batches(size: int, steps: int, count: int, random: torch.Generator) -> list[Tensor]:
    """Rows of each step: whole epochs in random order, one after the other."""
    epochs = math.ceil(steps * size / count)
    line = torch.cat([torch.randperm(count, generator=random) for _ in range(epochs)])
    return list(line[: steps * size].split(size))


@torch.no_grad()
def utilities(model: nn.Module, columns: dict[str, Tensor], timesteps: int) -> Tensor:
    """(Q,) minus the simple loss at evenly spaced timesteps, with the same noise for every model."""
    task, count = Diffusion(scheduler(), timesteps), len(columns["latents"])
    parts = [{k: v[i : i + 8] for k, v in columns.items()} for i in range(0, count, 8)]
    return torch.cat([-task.loss(model, part) for part in parts])


def seeds(role: str, count: int) -> Sequence[int]:
    """Disjoint seeds for the samples of each role."""
    start = {"learn": 0, "eval": 100_000, "subject": 200_000, "style": 300_000, "background": 400_000}
    start |= {"train": 500_000, "validation": 600_000}
    return range(start[role], start[role] + count)
