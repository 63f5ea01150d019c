"""Audits of labels beside cleanlab, OpenDataVal and the loss.

A classifier is trained on data of whose labels some are replaced by another class at random: a small CNN on 10,000
CIFAR-10 images (10 % wrong), an MLP on four data sets of scikit-learn (20 % wrong; a fifth of the rows is held out with
right labels). `unde` audits it as `index.audit_labels()` does, without retraining. cleanlab gets out-of-sample
probabilities of the same model, retrained on folds. OpenDataVal's DataOob (100 bagged logistic regressions) and
KNNShapley (which is given the held-out labels, all right) get the rows, and of images the hidden states of the trained
CNN. All are judged by AUC, by precision, recall and F1 of their own cut-offs, and by the share of wrong labels among
the first 10 % and 20 %. The ranking of `unde` was chosen on MNIST and on synthetic data. The estimate of the number of
wrong labels was drafted on those, on CIFAR-2 and on the 2,000 images of the test split of CIFAR-10; its bound was then
checked on digits, wine, breast cancer and 3,000 of these CIFAR-10 images.

UNDE_CLEANLAB and UNDE_OPENDATAVAL name the Python of an environment with each package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.shared import label_peers
from experiments.shared.paths import RUNS, computed
from unde import Index
from unde.data import Rows
from unde.evaluate import mislabel_auc
from unde.evaluate.hidden_states import HiddenStates
from unde.index.audit import audit
from unde.index.labels import rank_labels
from unde.tasks import Classification

PAPER = ""
VARIANTS = ("cifar10", "digits", "wine", "breast_cancer", "iris")
DATA = {"cifar10": ("cifar10_10k.npz",)}
PEERS = {"cleanlab": "UNDE_CLEANLAB", "opendataval": "UNDE_OPENDATAVAL"}
RATES, FOLDS, SEEDS = {"cifar10": 0.1}, {"cifar10": 3}, {"cifar10": 1}  # others: 0.2, 5, 3
EPOCHS = {"cifar10": 6}  # others: 100
BATCH, HELD_OUT = 64, 500  # images that KNNShapley is given


def cnn() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *block(3, 16),
        *block(16, 32),
        *block(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def data_set(variant: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and right labels, held-out inputs and labels."""
    if variant == "cifar10":
        with np.load(Path(os.environ["UNDE_DATA"]) / "cifar10_10k.npz") as file:
            x, held_out = (
                torch.from_numpy(file[f"x_{p}"]).permute(0, 3, 1, 2).float() / 255 for p in ("train", "test")
            )
            y, labels = (torch.from_numpy(file[f"y_{p}"].astype("int64")) for p in ("train", "test"))
        return x, y, held_out[:HELD_OUT], labels[:HELD_OUT]
    from sklearn import datasets
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    x, y = getattr(datasets, f"load_{variant}")(return_X_y=True)
    x, held_out, y, labels = train_test_split(x, y, test_size=0.2, random_state=seed, stratify=y)
    scaler = StandardScaler().fit(x)
    inputs = [torch.from_numpy(scaler.transform(part)).float() for part in (x, held_out)]
    return inputs[0], torch.from_numpy(y), inputs[1], torch.from_numpy(labels)


def train(variant: str, x: Tensor, y: Tensor, classes: int, seed: int) -> nn.Module:
    """AdamW, without augmentation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mlp = [nn.Linear(x[0].numel(), 64), nn.ReLU(), nn.Linear(64, classes)]
        model = (cnn() if variant == "cifar10" else nn.Sequential(*mlp)).train()
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(EPOCHS.get(variant, 100)):
        for batch in torch.randperm(len(y), generator=g).split(BATCH):
            if len(batch) > 1:
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    return model.eval()


@torch.no_grad()
def out_of_sample(variant: str, x: Tensor, y: Tensor, classes: int, seed: int) -> Tensor:
    """(N, C) probabilities by models that were not trained on the fold of an example."""
    folds, out = FOLDS.get(variant, 5), torch.zeros(len(y), classes)
    fold = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)) % folds
    for k in range(folds):
        with torch.enable_grad():
            model = train(variant, x[fold != k], y[fold != k], classes, seed)
        out[fold == k] = torch.cat([model(part).softmax(1) for part in x[fold == k].split(500)])
    return out


def ask_peer(package: str, inputs: Path) -> dict[str, np.ndarray]:
    python = os.environ.get(PEERS[package])
    if python is None:
        raise SystemExit(f"{PEERS[package]} names no Python: expected that of an environment with {package}")
    out = inputs.with_name(f"{inputs.stem}-{package}.npz")
    subprocess.run(
        [python, label_peers.__file__, package, inputs, out],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with np.load(out) as file:
        return dict(file)


def measure(values: np.ndarray, issues: np.ndarray | None, wrong: np.ndarray) -> dict[str, float]:
    """`values` are low for suspicious labels."""
    order = np.argsort(values, kind="stable")
    out = {"auc": mislabel_auc(-values, wrong)}
    out |= {
        f"found at {n} %": float(wrong[order[: len(order) * n // 100]].sum() / wrong.sum()) for n in (10, 20)
    }
    if issues is not None:
        hits = float((issues & wrong).sum())
        out |= {"precision": hits / max(1, issues.sum()), "recall": hits / wrong.sum()}
        out |= {"f1": 2 * hits / (issues.sum() + wrong.sum()), "flagged": float(issues.sum())}
    return out


def audit_all(variant: str, seed: int) -> dict[str, dict[str, float]]:
    """All audits of one training."""
    x, true, held_out, labels = data_set(variant, seed)
    classes, g = int(true.max()) + 1, torch.Generator().manual_seed(seed)
    y, count = true.clone(), round(RATES.get(variant, 0.2) * len(true))
    where = torch.randperm(len(y), generator=g)[:count]
    y[where] = (y[where] + torch.randint(1, classes, (count,), generator=g)) % classes
    wrong = (y != true).numpy()
    model = train(variant, x, y, classes, seed)
    folder = RUNS / f"label_audit-{variant}"
    shutil.rmtree(folder, ignore_errors=True)
    index = Index.build(
        model, Classification(), (x, y), folder, method="tracin", projection="kron(8)", progress=False
    )
    result = audit(index, count=1, progress=False)
    out = {"unde": measure(result.quality.numpy(), result.flagged.numpy(), wrong)}
    out["unde"] |= {"expected precision": result.precision, "wrong": float(count)}
    for name in ("loss", "adjusted-loss", "self-influence"):
        out[name] = measure(-rank_labels(result.evidence, name).scores.double().numpy(), None, wrong)
    inputs = RUNS / "label_audit" / f"{variant}-{seed}-inputs.npz"
    np.savez(
        inputs,
        x=states(model, x) if variant == "cifar10" else x.numpy(),
        y=y.numpy(),
        probabilities=out_of_sample(variant, x, y, classes, seed).numpy(),
        valid_x=states(model, held_out) if variant == "cifar10" else held_out.numpy(),
        valid_y=labels.numpy(),
    )
    for package in PEERS:
        arrays = ask_peer(package, inputs)
        for name in [key.removesuffix(", values") for key in arrays if key.endswith(", values")]:
            out[name] = measure(arrays[f"{name}, values"], arrays[f"{name}, issues"], wrong)
    with torch.no_grad():
        out["unde"]["held-out accuracy"] = float((model(held_out).argmax(1) == labels).float().mean())
        predicted = torch.cat([model(part).argmax(1) for part in x.split(500)])
    out["unde"]["wrong labels fitted"] = float((predicted == y)[torch.from_numpy(wrong)].float().mean())
    shutil.rmtree(folder)
    return out


def states(model: nn.Module, x: Tensor) -> np.ndarray:
    """Hidden states of images."""
    rows = Rows((x, torch.zeros(len(x), dtype=torch.int64)))
    reader = HiddenStates(model, Classification(), rows)
    read: Callable[[range], Any] = lambda r: reader.read(rows, r).hidden  # noqa: E731
    return torch.cat([read(r) for r in reader.ranges(rows)]).numpy()


def run(variant: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    methods: dict[str, dict[str, list[float]]] = {}
    seeds = SEEDS.get(variant, 3)
    for seed in range(seeds):
        path = RUNS / "label_audit" / f"{variant}-{seed}.json"
        for name, measures in computed(path, partial(audit_all, variant, seed)).items():
            for key, value in measures.items():
                methods.setdefault(name, {}).setdefault(key, []).append(round(value, 4))
        print(
            variant, seed, {n: (m["auc"][-1], m.get("f1", [0])[-1]) for n, m in methods.items()}, flush=True
        )
    return {"rate": RATES.get(variant, 0.2), "seeds": seeds, "methods": methods}
