"""CIFAR-10 in the paper's three roles, and a ResNet and a ViT trained on it from scratch.

The images are read from cifar10_10k.npz in the folder that UNDE_DATA names. 4,000 of its training images train,
500 of its test images learn weights from queries, 500 others evaluate; all three are balanced over classes.
Every training starts from the same initial weights: its seed says in which order, and mirrored or shifted how, the
images come. That leaves less noise between trainings than initial weights of their own would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.shared.paths import data_folder

Pair = tuple[Tensor, Tensor]
CORRUPTED = 0.10  # share of training labels made wrong, as in the paper's mislabel study


@dataclass(frozen=True)
class Images:
    train: Pair  # (4000, 3, 32, 32), normalised by the statistics of the training images, and labels
    learn: Pair  # 500
    evaluate: Pair  # 500
    rest: Pair  # 1,000 more test images, for accuracy
    true_labels: Tensor  # (4000,)
    classes: tuple[str, ...]


@cache
def images(corrupted: float = 0.0) -> Images:
    file = np.load(data_folder("cifar10_10k.npz"), allow_pickle=False)
    x, y = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"]).long()
    chosen = _balanced(y, 400, seed=0)
    test_x, test_y = torch.from_numpy(file["x_test"]), torch.from_numpy(file["y_test"]).long()
    order = _balanced(test_y, 200, seed=1)  # all 2,000, class after class: every run of 10 has one of each

    def pixels(rows: Tensor) -> Tensor:
        return rows.movedim(-1, 1).float() / 255

    mean = pixels(x[chosen]).mean((0, 2, 3), keepdim=True)
    spread = pixels(x[chosen]).std((0, 2, 3), keepdim=True)

    def pair(rows: Tensor, source: Tensor, labels: Tensor) -> Pair:
        return (pixels(source[rows]) - mean) / spread, labels[rows]

    train_x, train_y = pair(chosen, x, y)
    given, generator = train_y.clone(), torch.Generator().manual_seed(2)
    wrong = torch.randperm(len(given), generator=generator)[: round(corrupted * len(given))]
    given[wrong] = (given[wrong] + torch.randint(1, 10, (len(wrong),), generator=generator)) % 10
    roles = [pair(order[a:b], test_x, test_y) for a, b in ((0, 500), (500, 1000), (1000, 2000))]
    names = tuple(str(name) for name in file["classes"])
    return Images((train_x, given), *roles, train_y, names)


def _balanced(labels: Tensor, each: int, seed: int) -> Tensor:
    """Positions of `each` examples of every class, the classes in turn."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    by_class = [order[labels[order] == c][:each] for c in range(int(labels.max()) + 1)]
    return torch.stack(by_class, 1).flatten()


def resnet() -> nn.Module:
    """A ResNet with BatchNorm: a stem and three stages of one basic block."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=32,
            hidden_sizes=[32, 64, 128],
            depths=[1, 1, 1],
            layer_type="basic",
            num_labels=10,
            downsample_in_first_stage=False,
        )
    )


def vit() -> nn.Module:
    """A vision transformer: 16 patches of 8 × 8 and a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=192,
            initializer_range=0.05,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=10,
        )
    )


RECIPES: dict[str, tuple[Callable[[], nn.Module], int, float, float]] = {  # epochs, peak learning rate, decay
    "resnet": (resnet, 20, 1e-2, 5e-2),
    "vit": (vit, 22, 3e-3, 5e-2),
}


def initial(architecture: str) -> nn.Module:
    """Always the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RECIPES[architecture][0]()


def train(architecture: str, x: Tensor, y: Tensor, seed: int = 0) -> nn.Module:
    """AdamW under a one-cycle schedule on mirrored and shifted images."""
    from experiments.shared.classification_bank import training

    return training("cifar10", architecture, (x, y))(np.arange(len(y)), seed)


def prepare(batch: Pair, generator: torch.Generator) -> Pair:
    return moved(batch[0], generator), batch[1]


def moved(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mirrored or not, and shifted by up to 2 pixels."""
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    padded = F.pad(x, (2, 2, 2, 2))
    shifts = torch.randint(0, 5, (len(x), 2), generator=generator)
    at = torch.arange(32)
    rows, columns = shifts[:, :1] + at, shifts[:, 1:] + at  # (B, 32)
    which = torch.arange(len(x))[:, None, None]
    return padded.movedim(1, -1)[which, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()
