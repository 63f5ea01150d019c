"""Removing the top training examples and training again.

digits: an MLP on 600 of scikit-learn's digits, the top k of each of 12 test digits removed for it alone. cifar10: a CNN
on 1,000 images, the top k of 40 test images of cats removed at once. finetuned: the GPT-2-like model of
experiments/shared/finetuning.py fine-tuned on 160 sequences, the top k of the evaluation sequences of one document
removed at once. Beside k random examples, three seeds each. Methods have their defaults; nothing was tuned.
"""

from __future__ import annotations

import shutil
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.shared.paths import RUNS
from unde import Index
from unde.evaluate import TrainingSpec, baseline_scores, counterfactual
from unde.methods import EKFAC, TRAK, LoGRA, TracIn
from unde.tasks import CausalLM, Classification, Task

PAPER = ""
VARIANTS = ("digits", "cifar10", "finetuned")
BANKS = {}
DATA = {"cifar10": ("cifar10_10k.npz",), "finetuned": ("wikitext-2",)}
METHODS = {"TracIn": TracIn(), "TRAK": TRAK(), "LoGRA": LoGRA(), "EKFAC": EKFAC()}
SEEDS = 3
CAT = 3


def run(variant: str | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"digits": digits, "cifar10": cifar10, "finetuned": finetuned}[str(variant)]()


# --- digits ---------------------------------------------------------------------------------------------------


@cache
def digit_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits

    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].float() / 16, y[order].long()
    return (x[:600], y[:600]), (x[600:612], y[600:612])


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def digits() -> dict[str, Any]:
    train, queries = digit_data()
    spec = TrainingSpec(
        model=mlp,
        data=train,
        loss=classify,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        epochs=30,
        batch_size=60,
    )
    return remove("digits", spec, Classification(), train, queries, (5, 20, 60), "query", "none")


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# --- CIFAR-10 -------------------------------------------------------------------------------------------------


def cnn(seed: int) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    torch.manual_seed(seed)
    return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 16, 10))


def cifar10() -> dict[str, Any]:
    from experiments.shared.cifar10 import images

    data = images()
    train = tuple(column[:1000] for column in data.train)
    cats = (data.evaluate[1] == CAT).nonzero()[:40, 0]
    queries = tuple(column[cats] for column in data.evaluate)
    spec = TrainingSpec(
        model=cnn,
        data=train,
        loss=classify,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        epochs=8,
        batch_size=50,
    )
    return remove("cifar10", spec, Classification(), train, queries, (25, 50), "set", "kron(16)")


# --- fine-tuning ----------------------------------------------------------------------------------------------


def pretrained(seed: int) -> nn.Module:
    from experiments.shared import finetuning

    return finetuning.pretrained()


def finetuned() -> dict[str, Any]:
    from experiments.shared import finetuning
    from experiments.shared.corpora import training

    data = finetuning.corpus()[1]
    titles = [about["title"] for about in data.about["evaluate"]]
    title = max(sorted(set(titles)), key=titles.count)
    asked = [i for i, name in enumerate(titles) if name == title]
    columns = [{"input_ids": rows} for rows in (data.train[:160], data.evaluate[asked])]
    spec = training(pretrained, data.train[:160], **finetuning.FINETUNING)
    texts = tuple([data.text(row) for row in c["input_ids"]] for c in columns)
    out = remove("finetuned", spec, CausalLM(), *columns, (8, 16), "set", "kron(16)", texts)
    return out | {"document": title}


# --- all of them ----------------------------------------------------------------------------------------------


def losses(task: Task, queries: Any, model: nn.Module) -> Tensor:
    with torch.no_grad():
        return -task.loss(model, queries)


def classes(queries: Any, model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(queries[0]).argmax(1)


def remove(
    name: str,
    spec: TrainingSpec,
    task: Task,
    train: Any,
    queries: Any,
    ks: tuple[int, ...],
    of: str,
    projection: str,
    texts: Any = None,
) -> dict[str, Any]:
    examples = len(next(iter(train.values())) if isinstance(train, dict) else train[0])
    model, folder = spec(np.arange(examples), 0), RUNS / f"counterfactual-{name}"
    shutil.rmtree(folder / "index", ignore_errors=True)
    index = Index.build(model, task, train, folder / "index", method=EKFAC(projection=projection))
    scores: dict[str, Any] = {title: index.score(queries, m).total() for title, m in METHODS.items()}
    simple = baseline_scores(model, task, train, queries, texts=texts)
    scores |= {title: values for title, values in simple.items() if title != "loss"}
    result = counterfactual(
        scores, spec, partial(losses, task, queries), ks, of=of, seeds=SEEDS, path=folder / "models",
        predict=partial(classes, queries) if isinstance(task, Classification) else None,
    )  # fmt: skip
    for row in result.rows():
        print(*row, sep="\t", flush=True)
    return result.as_dict() | {
        "examples": examples,
        "queries": len(next(iter(scores.values()))),
        "seeds": SEEDS,
    }
