"""What the diffusion studies share: training of denoisers, how retrained ones are judged, and files."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from diffusers import DDPMScheduler
from torch import Tensor, nn

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
    alphas, random = scheduler().alphas_cumprod, torch.Generator().manual_seed(seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=1e-6, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: _warm_then_cosine(i, steps))
    model.train()
    for rows in _batches(len(images), batch_size, steps, random):
        x, part = images[rows], TIMESTEPS / len(rows)
        t = (torch.arange(len(rows)) * part + torch.rand(len(rows), generator=random) * part).long()
        noise = torch.randn(x.shape, generator=random)
        a = alphas[t].view(-1, 1, 1, 1)
        given = {}
        if conditions is not None:
            drop = torch.rand(len(rows), generator=random) < 0.1
            given["encoder_hidden_states"] = torch.where(drop.view(-1, 1, 1), nothing, conditions[rows])
        optimizer.zero_grad()
        predicted = model(a.sqrt() * x + (1 - a).sqrt() * noise, t, **given).sample
        (predicted - (a.sqrt() * noise - (1 - a).sqrt() * x)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def _warm_then_cosine(step: int, steps: int) -> float:
    return min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _batches(count: int, size: int, steps: int, random: torch.Generator) -> list[Tensor]:
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


def columns_of(latents: Tensor, conditions: Tensor | None = None) -> dict[str, Tensor]:
    return {"latents": latents} | ({} if conditions is None else {"encoder_hidden_states": conditions})


def seeds(role: str, count: int) -> Sequence[int]:
    """Disjoint seeds for the samples of each role."""
    start = {"learn": 0, "eval": 100_000, "subject": 200_000, "style": 300_000, "background": 400_000}
    start |= {"train": 500_000, "validation": 600_000}
    return range(start[role], start[role] + count)
