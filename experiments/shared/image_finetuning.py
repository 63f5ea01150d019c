"""A ResNet and a ViT pretrained once on six classes of CIFAR-10, then fine-tuned on 2,000 images of the other four.

All fine-tunings start from the same checkpoint, kept in experiments/models, with the same new head; their seeds order
the data, and nothing else is random. Statistics of BatchNorm stay those of pretraining.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.shared import cifar10, models
from experiments.shared.banks import Recipe
from experiments.shared.cifar10 import Pair
from experiments.shared.classification_bank import cross_entropy, one_cycle
from experiments.shared.paths import data_folder
from unde.evaluate import TrainingSpec
from unde.tasks import Classification

OTHERS = (1, 3, 5, 7)  # automobile, cat, dog, horse: the classes that are fine-tuned on
SIZES = {"train": 2000, "learn": 250, "evaluate": 250, "rest": 300}
FINETUNING = {"resnet": (5, 64, 1e-3), "vit": (6, 64, 1e-3)}  # epochs, batch size, learning rate


@dataclass(frozen=True)
class Images:
    pretrain: Pair  # 6,000 images of six classes
    train: Pair
    learn: Pair
    evaluate: Pair
    rest: Pair  # for accuracy


@cache
def images() -> Images:
    file = np.load(data_folder("cifar10_10k.npz"), allow_pickle=False)
    x, y = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"]).long()
    test_x, test_y = torch.from_numpy(file["x_test"]), torch.from_numpy(file["y_test"]).long()
    others = torch.tensor(OTHERS)
    pretrain = torch.isin(y, others).logical_not().nonzero().flatten()
    pixels = x[pretrain].movedim(-1, 1).float() / 255
    mean, spread = (f(pixels, dim=(0, 2, 3), keepdim=True) for f in (torch.mean, torch.std))

    def pair(source: Tensor, labels: Tensor, rows: Tensor, classes: Tensor) -> Pair:
        new = torch.searchsorted(classes, labels[rows])
        return (source[rows].movedim(-1, 1).float() / 255 - mean) / spread, new

    def in_turn(labels: Tensor, seed: int) -> Tensor:
        """Images of the four classes in turn: every run of 4 has one of each."""
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        return torch.stack([order[labels[order] == c][: (labels == c).sum()] for c in OTHERS], 1).flatten()

    six = torch.tensor([c for c in range(10) if c not in OTHERS])
    train, test = in_turn(y, 0)[: SIZES["train"]], in_turn(test_y, 1)
    ends = np.cumsum(list(SIZES.values())[1:])
    roles = [test[a:b] for a, b in zip([0, *ends], ends)]
    return Images(
        pair(x, y, pretrain, six),
        pair(x, y, train, others),
        *(pair(test_x, test_y, rows, others) for rows in roles),
    )


def _network(architecture: str, classes: int) -> nn.Module:
    """The model of `cifar10` with a head for so many classes; always the same initial weights."""
    model = cifar10.initial(architecture)
    head = model.classifier[-1] if architecture == "resnet" else model.classifier
    head.weight, head.bias = (nn.Parameter(p[:classes].detach().clone()) for p in (head.weight, head.bias))
    head.out_features = model.num_labels = model.config.num_labels = classes
    return model


def pretrained(architecture: str) -> nn.Module:
    def pretrain() -> nn.Module:
        _, epochs, lr, decay = cifar10.RECIPES[architecture]
        return TrainingSpec(
            model=lambda seed: _network(architecture, 6),
            data=images().pretrain,
            loss=cross_entropy,
            optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=decay),
            schedule=partial(one_cycle, lr),
            prepare=cifar10.prepare,
            epochs=epochs,
            channels_last=architecture == "resnet",
        )(np.arange(len(images().pretrain[1])), 0)

    return models.kept(f"{architecture}-pretrained", partial(_network, architecture, 6), pretrain)


def initial(architecture: str, seed: int = 0) -> nn.Module:
    """The pretrained body under a new head."""
    model = _network(architecture, len(OTHERS))
    body = {k: v for k, v in pretrained(architecture).state_dict().items() if not k.startswith("classifier")}
    model.load_state_dict(body, strict=False)
    return model


def loss(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model.eval()(batch[0]).logits, batch[1])  # BatchNorm as pretrained


def training(architecture: str) -> TrainingSpec:
    epochs, batch_size, lr = FINETUNING[architecture]
    return TrainingSpec(
        model=partial(initial, architecture),
        data=train_images,
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=1e-2),
        schedule=partial(one_cycle, lr),
        epochs=epochs,
        batch_size=batch_size,
        channels_last=architecture == "resnet",
    )


def train_images() -> Pair:
    return images().train


def attributed(architecture: str) -> nn.Module:
    """Fine-tuned on all 2,000 images once."""
    return models.kept(
        f"{architecture}-finetuned",
        partial(_network, architecture, len(OTHERS)),
        lambda: training(architecture)(np.arange(SIZES["train"]), 0),
    )


@torch.no_grad()
def utility(model: nn.Module) -> dict[str, Tensor]:
    data, task = images(), Classification()
    right = (model(data.rest[0]).logits.argmax(1) == data.rest[1]).float()
    return {"learn": -task.loss(model, data.learn), "eval": -task.loss(model, data.evaluate), "right": right}


def recipe(architecture: str) -> Recipe:
    return Recipe(
        name=f"{architecture}, pretrained, on half of 2,000 images of four other classes",
        train=training(architecture),
        utility=utility,
        n_train=SIZES["train"],
        subsets=64,
        stratify=images().train[1],
        seeds=2,
    )
