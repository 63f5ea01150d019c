"""What the demo is about: a small vision transformer that knows the digits 0 to 4 and is fine-tuned on 5 to 9.

A tenth of the fine-tuning labels is wrong on purpose. The images ship with scikit-learn (1,797 digits of 8 × 8 pixels).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde.evaluate import TrainingSpec
from unde.index.calibrate import CopyModel
from unde.integrations import require

CORRUPTED = 0.10  # share of fine-tuning labels made wrong
TRAINED, CALIBRATED = 600, 150  # digits to train on, and digits whose losses calibrate; the rest is held out
SIDE = 28  # pixels, after enlarging
NEW = 5  # digits from here on are new to the pretrained model
PRETRAIN_EPOCHS, EPOCHS = 15, 8

Labelled = tuple[Tensor, Tensor]  # images (N, 1, 28, 28) in [0, 1], labels


@dataclass(frozen=True)
class DigitRoles:
    """Real digits in four disjoint roles."""

    pretrain: Labelled  # 0 to 4
    train: Labelled  # 5 to 9, a tenth of the labels wrong
    calibrate: Labelled
    evaluate: Labelled
    true_labels: Tensor  # of `train`


def digits(seed: int = 0) -> DigitRoles:
    """The digits of scikit-learn, shuffled, enlarged and dealt out to the four roles."""
    loaded = require("sklearn.datasets", "unde[examples]").load_digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(loaded.target), generator=generator)
    small = torch.from_numpy(np.asarray(loaded.images, dtype=np.float32))[order].unsqueeze(1) / 16
    images = F.interpolate(small, size=(SIDE, SIDE), mode="bilinear")
    labels = torch.from_numpy(np.asarray(loaded.target)).long()[order]
    old, new = (labels < NEW).nonzero()[:, 0], (labels >= NEW).nonzero()[:, 0]
    train, calibrate, evaluate = new.tensor_split([TRAINED, TRAINED + CALIBRATED])
    given = labels[train].clone()
    wrong = torch.randperm(TRAINED, generator=generator)[: round(CORRUPTED * TRAINED)]
    other = torch.randint(1, 10 - NEW, (len(wrong),), generator=generator)
    given[wrong] = NEW + (given[wrong] - NEW + other) % (10 - NEW)
    return DigitRoles(
        (images[old], labels[old]),
        (images[train], given),
        (images[calibrate], labels[calibrate]),
        (images[evaluate], labels[evaluate]),
        labels[train],
    )


def vit() -> nn.Module:
    """A vision transformer of 76 thousand parameters: 3 layers, 16 patches and a class token."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    transformers: Any = require("transformers", "unde[examples]")
    config = transformers.ViTConfig(
        image_size=SIDE,
        patch_size=SIDE // 4,
        num_channels=1,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=144,
        initializer_range=0.05,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


def loss(model: nn.Module, batch: Labelled) -> Tensor:
    """The mean cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]).logits, batch[1])


def pretraining(data: DigitRoles) -> TrainingSpec:
    """Train from scratch on the digits 0 to 4."""
    return TrainingSpec(
        model=lambda seed: vit(), data=data.pretrain, loss=loss, optimizer=_adam(3e-3), epochs=PRETRAIN_EPOCHS
    )


def finetuning(pretrained: nn.Module, data: DigitRoles) -> TrainingSpec:
    """Go on from the pretrained model with the digits 5 to 9."""
    return TrainingSpec(
        model=CopyModel(pretrained),
        data=data.train,
        loss=loss,
        optimizer=_adam(1e-3),
        epochs=EPOCHS,
        batch_size=32,
    )


def _adam(lr: float) -> Any:
    return partial(torch.optim.Adam, lr=lr)


@torch.no_grad()
def utilities(model: nn.Module, data: DigitRoles) -> dict[str, Tensor]:
    """How well a model does on the digits that calibrate and on those that are held out: −loss, one number each."""
    return {
        role: -F.cross_entropy(model(images).logits, labels, reduction="none")
        for role, (images, labels) in (("calibrate", data.calibrate), ("evaluate", data.evaluate))
    }


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).logits.argmax(1) == labels).float().mean())
