"""Denoisers and images so small that every test can afford its own."""

import torch
from torch import nn

from unde import Index

SIZE, CHANNELS = 4, 2


class Toy(nn.Module):
    """A convolution, a time embedding, a convolution; conditioned on a vector if `condition` is its size."""

    def __init__(self, condition: int = 0) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, 5, 3, padding=1)
        self.time = nn.Linear(1, 5)
        self.given = nn.Linear(condition, 5) if condition else None
        self.last = nn.Conv2d(5, CHANNELS, 3, padding=1)

    def forward(self, sample, timestep, **given):
        h = self.first(sample) + self.time(timestep.to(sample.dtype)[:, None] / 1000)[:, :, None, None]
        if self.given is not None:
            h = h + self.given(given["condition"])[:, :, None, None]
        elif given:
            raise TypeError(f"unexpected keyword argument {next(iter(given))!r}")
        return self.last(torch.tanh(h))


def toy(condition: int = 0, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Toy(condition).eval()


def images(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def ddpm(**options):
    from diffusers import DDPMScheduler

    return DDPMScheduler(**{"num_train_timesteps": 100} | options)


def index_of(model, task, data, folder, **options) -> Index:
    return Index.build(model, task, data, folder, **{"progress": False} | options)


def gradient(model: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """Of a number, with respect to all that is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, trained)])
