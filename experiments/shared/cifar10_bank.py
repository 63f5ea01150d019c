"""Models retrained on random halves of 4,000 CIFAR-10 images, for the banks cifar10-resnet and cifar10-vit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from experiments.shared import cifar10
from experiments.shared.banks import Recipe
from experiments.shared.classification_bank import cross_entropy, one_cycle
from unde.evaluate import TrainingSpec
from unde.tasks import Classification


def training(architecture: str, data: cifar10.Pair | Callable[[], cifar10.Pair]) -> TrainingSpec:
    """As `cifar10.train`: AdamW under a one-cycle schedule on mirrored and shifted images."""
    _, epochs, lr, decay = cifar10.RECIPES[architecture]
    return TrainingSpec(
        model=partial(_initial, architecture),
        data=data,
        loss=cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=decay),
        schedule=partial(one_cycle, lr),
        prepare=_moved,
        epochs=epochs,
        batch_size=cifar10.BATCH,
        channels_last=architecture == "resnet",
    )


def _initial(architecture: str, seed: int) -> nn.Module:
    return cifar10.initial(architecture)


def _moved(batch: cifar10.Pair, generator: torch.Generator) -> cifar10.Pair:
    return cifar10.moved(batch[0], generator), batch[1]


def train_images() -> cifar10.Pair:
    return cifar10.images().train


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


def recipe(architecture: str) -> Recipe:
    return Recipe(
        name=f"{architecture} on half of 4,000 CIFAR-10 images",
        train=training(architecture, train_images),
        utility=utility,
        n_train=4000,
        subsets=64,
        stratify=cifar10.images().train[1],
    )
