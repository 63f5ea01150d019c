"""The trainings of the studies (experiments/shared) on random data of the same shape, and two that are smaller."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde.evaluate import TrainingSpec

N = 512


def images(data_set: str, architecture: str) -> TrainingSpec:
    from experiments.shared.classification_bank import training

    shape = (1, 28, 28) if data_set == "mnist" else (3, 32, 32)
    return training(data_set, architecture, (torch.rand(N, *shape), torch.randint(0, 10, (N,))))


def language(vocabulary: int, **changes: Any) -> TrainingSpec:
    from experiments.shared.corpora import training
    from experiments.shared.language_bank import initial

    tokens = torch.randint(0, vocabulary, (N, 64))
    return training(partial(initial, vocabulary=vocabulary), tokens, **{"epochs": 5, **changes})


def cifar2() -> TrainingSpec:
    from experiments.shared import cifar2 as study
    from experiments.shared.denoising import training

    data = {"x": torch.randn(N, 3, 16, 16)}
    return training(lambda seed: study.unet(), data, steps=study.STEPS, lr=study.LR, batch_size=study.BATCH)


def robots() -> TrainingSpec:
    """The UNet with LoRA, fresh: its frozen weights are not those of the study, which takes a file."""
    from experiments.shared import pictures
    from experiments.shared import robots as study
    from experiments.shared.denoising import training

    from unde.integrations.diffusers import add_lora

    def initial(seed: int) -> nn.Module:
        add_lora(model := pictures.unet(), rank=pictures.RANK)
        return model

    conditions, nothing = torch.randn(N, pictures.TOKENS, 384), torch.zeros(1, pictures.TOKENS, 384)
    data = {"x": torch.randn(N, pictures.CHANNELS, 8, 8), "conditions": conditions}
    return training(initial, data, steps=study.STEPS, lr=study.LR, nothing=nothing)


def tiny(make: Callable[[], nn.Module]) -> TrainingSpec:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return TrainingSpec(
        model=lambda seed: make(),
        data=(torch.randn(N, 64), torch.randint(0, 10, (N,))),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        epochs=50,
        batch_size=32,
    )


CASES: dict[str, Callable[[], TrainingSpec]] = {
    "linear": lambda: tiny(lambda: nn.Linear(64, 10)),
    "mlp": lambda: tiny(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))),
    "mnist-resnet": lambda: images("mnist", "resnet"),
    "mnist-vit": lambda: images("mnist", "vit"),
    "cifar10-resnet": lambda: images("cifar10", "resnet"),
    "cifar10-vit": lambda: images("cifar10", "vit"),
    "sotu-gpt2": lambda: language(2048),
    "wikitext-gpt2": lambda: language(3072),
    "finetuned-gpt2": lambda: language(4096, epochs=3),
    "cifar2": cifar2,
    "robots": robots,
}
QUICK = ("mlp", "mnist-vit")


def subsets(count: int) -> list[tuple[np.ndarray, int]]:
    return [(np.random.default_rng(i).permutation(N)[: N // 2], i) for i in range(count)]
