"""The banks of retrained models, by name: opened if they are there, made (and resumed) if asked for.

    python -m experiments bank cifar10-resnet

Each bank is one small file in experiments/banks, kept in the repository. The parts of a bank that was interrupted
are in experiments/banks/NAME.npz.parts; the same command goes on from them. NAME-again has the first subsets of NAME,
trained with other seeds: how well the two agree bounds what any attribution can reach.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.shared.paths import BANKS
from unde.errors import UndeError
from unde.evaluate import Bank

AGAIN = "-again"
TWICE = 16  # subsets that are trained with other seeds, too


@dataclass(frozen=True)
class Recipe:
    name: str
    train: Callable[[np.ndarray, int], Any]
    utility: Callable[[Any], Any]
    n_train: int
    subsets: int
    stratify: Any = None
    seeds: int = 1  # models on each subset, whose utilities are averaged


# name → (module with `recipe`, its arguments); imported only when a bank has to be made
MADE_BY: dict[str, tuple[str, tuple[Any, ...]]] = {
    "mnist-resnet": ("classification_bank", ("mnist", "resnet")),
    "mnist-vit": ("classification_bank", ("mnist", "vit")),
    "sotu-gpt2": ("language_bank", ("sotu",)),
    "wikitext-gpt2": ("language_bank", ("wikitext",)),
    "cifar2": ("diffusion_bank", ("cifar2",)),
    "robots": ("diffusion_bank", ("robots",)),
    "cifar10-resnet": ("classification_bank", ("cifar10", "resnet")),
    "cifar10-vit": ("classification_bank", ("cifar10", "vit")),
    "finetuned-gpt2": ("finetuning", ()),
    "finetuned-lora": ("finetuning", ("lora",)),
    "finetuned-resnet": ("image_finetuning", ("resnet",)),
    "finetuned-vit": ("image_finetuning", ("vit",)),
    "finetuned-unet": ("robots_finetuning", ()),
}


@dataclass(frozen=True)
class OtherSeeds:
    """Trains as `train` does, with the seed after."""

    train: Callable[[np.ndarray, int], Any]

    def __call__(self, indices: np.ndarray, seed: int) -> Any:
        return self.train(indices, seed + 1)


def recipe(name: str) -> Recipe:
    """How the bank `name` is made, or the one of its first subsets with other seeds."""
    first = name.removesuffix(AGAIN)
    if first not in MADE_BY:
        raise UndeError(
            f"there is no recipe for a bank {name!r}: known are {', '.join(MADE_BY)}, and each with {AGAIN} behind it"
        )
    module, arguments = MADE_BY[first]
    made: Recipe = importlib.import_module(f"experiments.shared.{module}").recipe(*arguments)
    if name == first:
        return made
    return replace(made, name=f"{made.name}, other seeds", train=OtherSeeds(made.train), subsets=TWICE)


def make(name: str, processes: int | None = None) -> Bank:
    """Trains what is missing of a bank, one model for each core at the same time unless said otherwise."""
    r = recipe(name)
    return Bank.run(
        BANKS / f"{name}.npz",
        train=r.train,
        utility=r.utility,
        n_train=r.n_train,
        subsets=r.subsets,
        stratify=r.stratify,
        seeds_per_subset=r.seeds,
        name=r.name,
        processes=processes or os.cpu_count() or 1,
    )


def open_bank(name: str) -> Bank:
    path = BANKS / f"{name}.npz"
    if not path.exists():
        raise UndeError(f"the bank {name} is not there: make it with `python -m experiments bank {name}`")
    return Bank.open(path)
