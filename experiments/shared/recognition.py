"""Small networks that read subject, style and background off a picture: a judge of generated ones, and an encoder."""

from __future__ import annotations

from functools import cache
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetModel

from experiments.datasets import Attributes, pretraining_robots, robot_queries
from experiments.datasets.robot_sets import CATEGORIES
from experiments.shared.models import kept

STEPS, BATCH, LR = 900, 32, 2e-3


class Reader(nn.Module):
    """(B, 3, 32, 32) in [0, 1] → logits for each attribute."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        config = ResNetConfig(
            embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic"
        )
        self.body = ResNetModel(config)
        self.heads = nn.ModuleDict({a: nn.Linear(128, size) for a, size in sizes.items()})

    def features(self, x: Tensor) -> Tensor:
        x = F.interpolate(2 * x - 1, scale_factor=2.0)  # the stem of a ResNet shrinks its input by four
        return self.body(x).pooler_output.flatten(1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.features(x)
        return {a: head(found) for a, head in self.heads.items()}


def to_tensor(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def _fitted(those: Attributes) -> Reader:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reader = Reader({a: len(names) for a, names in those.categories.items()})
    x, y = to_tensor(those.images), {a: torch.from_numpy(v) for a, v in those.labels.items()}
    optimizer = torch.optim.AdamW(reader.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, STEPS)
    random = torch.Generator().manual_seed(0)
    reader.train()
    for _ in range(STEPS):
        rows = torch.randint(len(x), (BATCH,), generator=random)
        logits = reader(x[rows])
        optimizer.zero_grad()
        sum(F.cross_entropy(out, y[a][rows]) for a, out in logits.items()).backward()
        optimizer.step()
        schedule.step()
    return reader.eval()


def _kept(name: str, those: Attributes) -> Reader:
    sizes = {a: len(names) for a, names in those.categories.items()}
    return cast(Reader, kept(name, lambda: Reader(sizes), lambda: _fitted(those)))


def _both(repeats: int, seed: int) -> Attributes:
    """Drawn combinations of the categories of each split."""
    a, b = (robot_queries(split, repeats, seed=seed) for split in ("train", "validation"))
    labels = {k: np.concatenate([a.labels[k], b.labels[k]]) for k in a.labels}
    return Attributes(
        np.concatenate([a.images, b.images]), a.prompts + b.prompts, labels, CATEGORIES, a.licence, a.glue
    )


@cache
def judge() -> Reader:
    """Knows the thirty categories, from 2,000 drawn combinations."""
    return _kept("judge", _both(8, seed=1))


@cache
def encoder() -> Reader:
    """Knows other subjects, styles and backgrounds only: what `pretraining_robots` shows."""
    return _kept("encoder", pretraining_robots(4000, 32))


@torch.no_grad()
def recognised(images: Tensor, labels: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """For each attribute, (Q,) whether the judge sees in a picture what it should show."""
    logits = [judge()(part) for part in images.split(100)]
    seen = {a: torch.cat([out[a] for out in logits]).argmax(1).numpy() for a in labels}
    return {a: seen[a] == wanted for a, wanted in labels.items()}
