"""Models retrained on random halves of 4,000 CIFAR-10 images, for the banks cifar10-resnet and cifar10-vit."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from experiments.shared import cifar10
from experiments.shared.banks import Recipe
from unde.tasks import Classification


def train_on(indices: np.ndarray, seed: int, *, architecture: str, again: int) -> nn.Module:
    x, y = cifar10.images().train
    which = torch.from_numpy(indices)
    return cifar10.train(architecture, x[which], y[which], seed=seed + again)


@torch.no_grad()
def utility(model: nn.Module) -> dict[str, Tensor]:
    """−loss of the queries of both roles, and whether 1,000 other test images are classified rightly."""
    data, task = cifar10.images(), Classification()
    x, y = data.rest
    return {
        "learn": -task.loss(model, data.learn),
        "eval": -task.loss(model, data.evaluate),
        "right": (model(x).logits.argmax(1) == y).float(),
    }


def recipe(architecture: str, again: int = 0) -> Recipe:
    """`again` makes other seeds for the same subsets."""
    name = f"{architecture} on half of 4,000 CIFAR-10 images" + (f", other seeds {again}" if again else "")
    return Recipe(
        name=name,
        train=partial(train_on, architecture=architecture, again=again),
        utility=utility,
        n_train=4000,
        subsets=16 if again else 64,
        stratify=cifar10.images().train[1],
    )
