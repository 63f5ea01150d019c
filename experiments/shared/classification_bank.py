"""Models retrained on random halves of 4,000 MNIST digits or CIFAR-10 images, for four banks.

MNIST digits are trained on as `experiments.shared.digits.train` does, all drawn from the seed; CIFAR-10 images as
`cifar10.train` does, from the same initial weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from experiments.shared import cifar10, digits
from experiments.shared.banks import Recipe
from unde.evaluate import TrainingSpec
from unde.tasks import Classification

Pair = tuple[Tensor, Tensor]
SUBSETS = {"mnist-resnet": 100}  # 100 in the paper, else 64


def training(data_set: str, architecture: str, data: Pair | Callable[[], Pair]) -> TrainingSpec:
    """AdamW under a one-cycle schedule; CIFAR-10 images are mirrored and shifted."""
    _, epochs, lr, decay = (digits if data_set == "mnist" else cifar10).RECIPES[architecture]
    return TrainingSpec(
        model=partial(_initial, data_set, architecture),
        data=data,
        loss=cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=decay),
        schedule=partial(one_cycle, lr),
        prepare=None if data_set == "mnist" else cifar10.prepare,
        epochs=epochs,
        batch_size=64,
        channels_last=architecture == "resnet",
    )


def _initial(data_set: str, architecture: str, seed: int) -> nn.Module:
    if data_set == "cifar10":
        return cifar10.initial(architecture)
    torch.manual_seed(seed)
    return digits.RECIPES[architecture][0]()


def cross_entropy(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1])


def one_cycle(lr: float, optimizer: Optimizer, steps: int) -> LRScheduler:
    return OneCycleLR(optimizer, lr, total_steps=steps)


def images(data_set: str) -> digits.Digits | cifar10.Images:
    return digits.digits() if data_set == "mnist" else cifar10.images()


def train_images(data_set: str) -> Pair:
    return images(data_set).train


@torch.no_grad()
def utility(model: nn.Module, *, data_set: str) -> dict[str, Tensor]:
    """−loss of the queries of both roles: "learn" serves to choose defaults, "eval" to report. Of CIFAR-10 also
    whether 1,000 other test images are classified rightly."""
    data, task = images(data_set), Classification()
    found = {"learn": -task.loss(model, data.learn), "eval": -task.loss(model, data.evaluate)}
    if data_set == "cifar10":
        x, y = data.rest
        found["right"] = (model(x).logits.argmax(1) == y).float()
    return found


def recipe(data_set: str, architecture: str) -> Recipe:
    what = {"mnist": "MNIST digits", "cifar10": "CIFAR-10 images"}[data_set]
    return Recipe(
        name=f"{architecture} on half of 4,000 {what}",
        train=training(data_set, architecture, partial(train_images, data_set)),
        utility=partial(utility, data_set=data_set),
        n_train=4000,
        subsets=SUBSETS.get(f"{data_set}-{architecture}", 64),
        stratify=cifar10.images().train[1] if data_set == "cifar10" else None,
    )
