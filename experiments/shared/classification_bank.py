"""Models retrained on random halves of 4,000 MNIST digits, for the banks mnist-resnet and mnist-vit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from experiments.shared.banks import Recipe
from unde.evaluate import TrainingSpec
from unde.tasks import Classification
from unde.ui.demo.digits import RECIPES, digits

Pair = tuple[Tensor, Tensor]

SUBSETS = {"resnet": 100, "vit": 64}  # 100 in the paper


def training(architecture: str, data: Pair | Callable[[], Pair]) -> TrainingSpec:
    """As `unde.ui.demo.digits.train`: AdamW and a one-cycle schedule, all drawn from the seed."""
    make, epochs, lr, decay = RECIPES[architecture]
    return TrainingSpec(
        model=partial(_initial, make),
        data=data,
        loss=cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=decay),
        schedule=partial(one_cycle, lr),
        epochs=epochs,
        batch_size=64,
        channels_last=architecture == "resnet",
    )


def _initial(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def cross_entropy(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1])


def one_cycle(lr: float, optimizer: Optimizer, steps: int) -> LRScheduler:
    return OneCycleLR(optimizer, lr, total_steps=steps)


def train_images() -> Pair:
    return digits().train


@torch.no_grad()
def utility(model: nn.Module) -> dict[str, Tensor]:
    """−loss of the queries of both roles: "learn" serves to choose defaults, "eval" to report."""
    data, task = digits(), Classification()
    return {"learn": -task.loss(model, data.learn), "eval": -task.loss(model, data.evaluate)}


def recipe(architecture: str) -> Recipe:
    return Recipe(
        name=f"{architecture} on half of 4,000 MNIST digits",
        train=training(architecture, train_images),
        utility=utility,
        n_train=4000,
        subsets=SUBSETS[architecture],
    )
