"""Rankings of wrong labels beside the loss, over several trainings.

Models are trained from scratch on 2,500 images some of whose labels are wrong, for three lengths: unfitted (about half
to three quarters of the training labels), fitted (most right labels, fewer of the wrong ones), memorised (wrong labels
too). Each training has its own flips, initial weights and order of images. Every ranking of `unde.index.labels`, and
combinations of a loss with a ranking by influence, are judged by AUC and by their precision among the first 1 % and
5 % of the examples. The form of the adjusted loss was drafted on the ResNets; the CNN and the MLP were not looked at.
The rankings of each training are kept in experiments/runs, so an interrupted run goes on.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor, nn

from experiments.shared.paths import RUNS, unfinished
from unde import Index
from unde.evaluate import mislabel_auc
from unde.index.labels import RANKINGS, label_rankings
from unde.methods import TRAK, LoGRA, Method, TracIn
from unde.tasks import Classification

PAPER = ""
VARIANTS = ("cifar10-resnet", "mnist-resnet", "cifar10-cnn", "mnist-mlp")
BANKS = {}  # variants are named as banks are, which are not needed
DATA = {"cifar10-resnet": ("cifar10_10k.npz",), "cifar10-cnn": ("cifar10_10k.npz",)}
METHODS: dict[str, Method] = {"TracIn": TracIn(), "TRAK": TRAK(), "LoGRA": LoGRA()}
OF_THE_MODEL = ("adjusted-loss", "loss", "margin")  # rankings that need no method
TRAININGS, RATES, BATCH = 5, (0.05, 0.10), 64
SHARES = (0.01, 0.05)  # of the examples, for precision


@dataclass(frozen=True)
class Recipe:
    make: Callable[[], nn.Module]
    epochs: Mapping[str, float]  # by how far a model is fitted
    lr: float
    decay: float
    images: int


def cnn() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Linear(64 * 16, 10)]
    return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 64), *head)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def recipe(variant: str) -> Recipe:
    from experiments.shared import cifar10, digits

    states = ("unfitted", "fitted", "memorised")

    def epochs(*numbers: float) -> dict[str, float]:
        return dict(zip(states, numbers, strict=True))

    return {
        "cifar10-resnet": Recipe(cifar10.resnet, epochs(4, 8, 16), 1e-2, 5e-2, 2500),
        "mnist-resnet": Recipe(digits.resnet, epochs(0.7, 6, 40), 1e-2, 1e-2, 2500),
        "cifar10-cnn": Recipe(cnn, epochs(3, 8, 24), 3e-3, 1e-2, 2500),
        "mnist-mlp": Recipe(mlp, epochs(0.7, 6, 40), 3e-3, 1e-2, 2500),
    }[variant]


def images(variant: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and their true labels, held-out images and theirs."""
    from experiments.shared.classification_bank import images as in_roles

    found = in_roles(variant.partition("-")[0])
    (x, y), (held_out, labels) = found.train, found.evaluate
    count = recipe(variant).images
    return x[:count], y[:count], held_out, labels


def flip(labels: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """Labels of which a share is another class, drawn at random."""
    flipped = labels.clone()
    where = torch.randperm(len(labels), generator=generator)[: round(rate * len(labels))]
    flipped[where] = (flipped[where] + torch.randint(1, 10, (len(where),), generator=generator)) % 10
    return flipped


def logits(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    return found if isinstance(found, Tensor) else found.logits


def train(recipe: Recipe, epochs: float, x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """AdamW under a one-cycle schedule, without augmentation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = recipe.make().train()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.decay)
    steps = round(epochs * -(-len(y) // BATCH))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=steps)
    batches: list[Tensor] = []
    for _ in range(steps):
        batches = batches or list(torch.randperm(len(y), generator=generator).split(BATCH))
        batch = batches.pop()
        optimizer.zero_grad()
        F.cross_entropy(logits(model, x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((logits(model, x).argmax(1) == y).double().mean())


def rank(variant: str, state: str, rate: float, seed: int, path: Path) -> None:
    """Train one model and write all rankings of its training examples."""
    start = time.monotonic()
    how, (x, true, held_out, labels) = recipe(variant), images(variant)
    y = flip(true, rate, torch.Generator().manual_seed(seed))
    model = train(how, how.epochs[state], x, y, seed)
    folder = RUNS / f"wrong_labels-{variant}"
    shutil.rmtree(folder, ignore_errors=True)
    index = Index.build(
        model, Classification(), (x, y), folder, method=TracIn("kron(16)"), batch_size=64, progress=False
    )
    out: dict[str, np.ndarray] = {"wrong": (y != true).numpy()}
    for name, method in METHODS.items():
        names = [by for by in RANKINGS if by != "quality"]  # which is younger: label_audit has it
        wanted = [by for by in names if by not in OF_THE_MODEL or name == "TracIn"]
        for by, suspects in label_rankings(index, names=wanted, method=method, progress=False).items():
            out[by if by in OF_THE_MODEL else f"{by}, {name}"] = suspects.scores.numpy()
    out["accuracy"] = np.array([accuracy(model, x, y), accuracy(model, held_out, labels)])
    wrong = y != true
    out["wrong labels fitted"] = np.array(accuracy(model, x[wrong], y[wrong]))
    out["seconds"] = np.array(time.monotonic() - start)
    shutil.rmtree(folder)
    with unfinished(path) as part:
        np.savez_compressed(part, **out)  # ty: ignore


def ranks(scores: np.ndarray) -> np.ndarray:
    """From 0 for the least suspicious example to 1."""
    return rankdata(scores) / len(scores)


COMBINATIONS: dict[str, Callable[[Mapping[str, np.ndarray], str], np.ndarray]] = {
    "mean rank of loss and self-influence": lambda by, method: (
        ranks(by["loss"]) + ranks(by[f"self-influence, {method}"])
    ),
    "mean rank of loss and normalised": lambda by, method: (
        ranks(by["loss"]) + ranks(by[f"normalised, {method}"])
    ),
    "adjusted-loss plus normalised, each over its mean": lambda by, method: (
        by["adjusted-loss"] / by["adjusted-loss"].mean()
        + by[f"normalised, {method}"] / by[f"normalised, {method}"].mean()
    ),
    "loss plus normalised, each over its mean": lambda by, method: (
        by["loss"] / by["loss"].mean() + by[f"normalised, {method}"] / by[f"normalised, {method}"].mean()
    ),
}


def measure(scores: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """AUC, and the share of wrong labels among the first."""
    order = np.argsort(-scores, kind="stable")
    first = {f"{share:.0%}": float(wrong[order[: round(share * len(wrong))]].mean()) for share in SHARES}
    return {"auc": mislabel_auc(scores, wrong), **first}


def judge(path: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Measures of every ranking of one training, and of every combination."""
    with np.load(path) as file:
        found = dict(file)
    by = {name: scores for name, scores in found.items() if name.partition(",")[0] in RANKINGS}
    for method in METHODS:
        for name, combine in COMBINATIONS.items():
            by[f"{name}, {method}"] = combine(by, method)
    for name, scores in by.items():
        yield name, measure(scores, found["wrong"])


def run(variant: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    settings: dict[str, Any] = {}
    seconds = 0.0
    for state, rate in itertools.product(recipe(variant).epochs, RATES):
        rankings: dict[str, dict[str, list[float]]] = {}
        facts: dict[str, list[float]] = {
            "training accuracy": [],
            "held-out accuracy": [],
            "wrong labels fitted": [],
        }
        for seed in range(TRAININGS):
            path = RUNS / "wrong_labels" / f"{variant}-{state}-{rate:.2f}-{seed}.npz"
            if not path.exists():
                rank(variant, state, rate, seed, path)
            for name, measures in judge(path):
                for key, value in measures.items():
                    rankings.setdefault(name, {}).setdefault(key, []).append(round(value, 4))
            with np.load(path) as file:
                values = (*file["accuracy"], file["wrong labels fitted"])
                seconds += float(file["seconds"])
            for fact, value in zip(facts.values(), values, strict=True):
                fact.append(round(float(value), 4))
        settings[f"{state}, {rate:.0%}"] = {**facts, "rankings": rankings}
        print(
            variant,
            state,
            rate,
            {name: np.mean(found["auc"]).round(3) for name, found in rankings.items()},
            flush=True,
        )
    return {
        "images": recipe(variant).images,
        "trainings": TRAININGS,
        "seconds of trainings": round(seconds),
        "settings": settings,
    }
