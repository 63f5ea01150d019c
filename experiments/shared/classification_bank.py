"""Models retrained on random halves of 4,000 MNIST digits, for the banks mnist-resnet and mnist-vit."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from experiments.shared.banks import Recipe
from unde.demo.digits import digits, train
from unde.tasks import Classification

SUBSETS = {"resnet": 100, "vit": 64}  # 100 in the paper


def train_on(indices: np.ndarray, seed: int, *, architecture: str, again: int) -> nn.Module:
    x, y = digits().train
    which = torch.from_numpy(indices)
    return train(architecture, x[which], y[which], seed=seed + again)


@torch.no_grad()
def utility(model: nn.Module) -> dict[str, Tensor]:
    """−loss of the queries of both roles: "learn" serves to choose defaults, "eval" to report."""
    data, task = digits(), Classification()
    return {"learn": -task.loss(model, data.learn), "eval": -task.loss(model, data.evaluate)}


def recipe(architecture: str, again: int = 0) -> Recipe:
    """`again` makes other seeds, initial weights included, for the same subsets."""
    return Recipe(
        name=f"{architecture} on half of 4,000 MNIST digits" + (f", other seeds {again}" if again else ""),
        train=partial(train_on, architecture=architecture, again=again),
        utility=utility,
        n_train=4000,
        subsets=16 if again else SUBSETS[architecture],
    )
