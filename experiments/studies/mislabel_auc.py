"""Finding wrong labels by normalised self-influence.

10 % of the 4,000 training labels are wrong, the same in five trainings with other seeds. Self-influence of each image
is divided by the sum of its top-10 (ResNet) or top-100 (ViT) scores, as in the paper; also judged are the raw one and
that sum by itself. "weighted" are weights by Algorithm 1 on 500 other images, at one k and λ′ for all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import nn

from experiments.shared.paths import RUNS
from unde import Index, learn_weights
from unde.evaluate import mislabel_auc
from unde.methods import TRAK, Method, TracIn
from unde.scoring import GroupScores
from unde.tasks import Classification

PAPER = "Table 3"
VARIANTS = ("mnist", "cifar10")
DATA = {"cifar10": ("cifar10_10k.npz",)}
METHODS: dict[str, Method] = {"TracIn": TracIn(), "TRAK": TRAK()}
TOP = {"resnet": 10, "vit": 100}
TRAININGS = 5


def data_of(variant: str) -> tuple[Any, Callable[..., nn.Module]]:
    """Images with wrong labels among them, and how a model is trained on them."""
    if variant == "mnist":
        from experiments.shared import digits

        return digits.digits(digits.CORRUPTED), digits.train
    from experiments.shared import cifar10

    return cifar10.images(cifar10.CORRUPTED), cifar10.train


def run(variant: str) -> dict[str, Any]:
    """{architecture and method: {kind and scale: an AUC for each training}}"""
    torch.set_num_threads(1)  # one thread trains and indexes the same bits on every machine of a kind
    data, train = data_of(variant)
    wrong = data.train[1] != data.true_labels
    results: dict[str, Any] = {}
    for architecture, seed in product(TOP, range(TRAININGS)):
        model = train(architecture, *data.train, seed=seed)
        folder = RUNS / f"mislabel_auc-{variant}-{architecture}"
        shutil.rmtree(folder, ignore_errors=True)
        index = Index.build(
            model, Classification(), data.train, folder, method=TracIn("kron(16)"), batch_size=64
        )
        learn = index.features(data.learn)
        for name, method in METHODS.items():
            row = results.setdefault(f"{architecture} {name}", {"top": TOP[architecture]})
            found = areas(index, method, index.score(learn, method), wrong, TOP[architecture])
            for kind, area in found.items():
                row.setdefault(kind, []).append(area)
            print(variant, architecture, name, {k: v[-1] for k, v in row.items() if k != "top"}, flush=True)
    shutil.rmtree(folder)
    return results


def areas(
    index: Index, method: Method, learn: GroupScores, wrong: Any, top: int, subset: list[int] | None = None
) -> dict[str, float]:
    """AUC without and with weights, of self-influence, of the ratio to its top scores, and of their sum."""
    found = {}
    for kind, w in {"unweighted": None, "weighted": learn_weights(learn)}.items():
        raw, ratio = (
            index.self_influence(w, normalize_top=n, subset=subset, method=method) for n in (None, top)
        )
        for scale, ranking in (("raw", raw), ("normalised", ratio), ("divisor", raw / ratio)):
            found[f"{kind} {scale}"] = mislabel_auc(ranking, wrong)
    return found
