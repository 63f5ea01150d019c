"""Finding wrong labels by normalised self-influence.

10 % of the 4,000 training labels are wrong. Self-influence of each image is divided by the sum of its top-10 (ResNet)
or top-100 (ViT) scores, as in the paper; also kept is the raw one. "weighted" are weights of the paper's objective on
500 other images, nothing judged, "self-retrieval" those that the index learns from its own training examples: for
these the AUC is also taken without the examples they were learned from.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from experiments.shared.paths import RUNS
from experiments.shared.sweep import objective
from unde import Index, Weights
from unde.evaluate import mislabel_auc, mislabel_auc_interval
from unde.methods import TRAK, Method, TracIn
from unde.tasks import Classification

PAPER = "Table 3"
VARIANTS = ("mnist", "cifar10")
DATA = {"cifar10": ("cifar10_10k.npz",)}
METHODS: dict[str, Method] = {"TracIn": TracIn(), "TRAK": TRAK()}
TOP = {"resnet": 10, "vit": 100}


def data_of(variant: str) -> tuple[Any, Callable[..., nn.Module]]:
    """Images with wrong labels among them, and how a model is trained on them."""
    if variant == "mnist":
        from unde.ui.demo import digits

        return digits.digits(digits.CORRUPTED), digits.train
    from experiments.shared import cifar10

    return cifar10.images(cifar10.CORRUPTED), cifar10.train


def measured(influence: Tensor, wrong: Tensor) -> dict[str, Any]:
    return {
        "auc": mislabel_auc(influence, wrong),
        "interval95": list(mislabel_auc_interval(influence, wrong)),
    }


def unseen(weights: Weights, count: int) -> Tensor:
    """(count,) which training examples the weights were not learned from."""
    kept = torch.ones(count, dtype=torch.bool)
    kept[torch.tensor([i for part in weights.provenance["examples"].values() for i in part])] = False
    return kept


def run(variant: str) -> dict[str, Any]:
    torch.set_num_threads(1)  # one thread trains and indexes the same bits on every machine of a kind
    data, train = data_of(variant)
    wrong = data.train[1] != data.true_labels
    results: dict[str, Any] = {}
    for architecture, top in TOP.items():
        model = train(architecture, *data.train)
        folder = RUNS / f"mislabel_auc-{variant}-{architecture}"
        shutil.rmtree(folder, ignore_errors=True)
        index = Index.build(
            model, Classification(), data.train, folder, method=TracIn("kron(16)"), batch_size=64
        )
        learn = index.features(data.learn)
        for name, method in METHODS.items():
            kinds = {
                "unweighted": None,
                "weighted": objective(index.score(learn, method)),
                "self-retrieval": index.learn_weights(method=method),
            }
            row: dict[str, Any] = {"weights": kinds["weighted"].values.tolist(), "top": top}
            row["self-retrieval weights"] = kinds["self-retrieval"].values.tolist()
            others = unseen(kinds["self-retrieval"], len(wrong))
            for kind, w in kinds.items():
                for scale, normalize in (("normalised", top), ("raw", None)):
                    influence = index.self_influence(w, normalize_top=normalize, method=method)
                    found = row[f"{kind} {scale}"] = measured(influence, wrong)
                    print(f"{architecture} {name} {kind} {scale} {100 * found['auc']:.2f}", flush=True)
                    if kind != "weighted":  # paired with each other, on the same examples
                        row[f"{kind} {scale}, others"] = measured(influence[others], wrong[others])
            results[f"{architecture} {name}"] = row
    return results
