"""Metrics of quanda on a digits MLP: explainers of unde beside those of captum, as quanda wraps them, and chance.

A training has its own wrong labels (10 %) and seed. Class detection: the share of the top 5 that have the
query's label. Subclass detection: the same with digits as subclasses of five pairs that the model is trained on.
Mislabeling detection: the area under the curve of wrong labels found by self-influence. Cardinality: the share of
different examples among all top tens.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments.shared.digits import digits
from unde.evaluate import TrainingSpec
from unde.integrations import require
from unde.integrations.quanda import explainer
from unde.methods import EKFAC, TRAK, LoGRA, TracIn

SEEDS, WRONG = 1, 0.1
K16 = "kron(16)"
METHODS = {
    "default": "auto", "TracIn": TracIn(K16), "TRAK": TRAK(K16), "LoGRA": LoGRA(K16), "EKFAC": EKFAC(K16)
}  # fmt: skip


def network(classes: int, seed: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes)
    )


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    return TrainingSpec(
        model=partial(network, int(y.max()) + 1),
        data=(x, y),
        loss=cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        epochs=10,
    )(np.arange(len(y)), seed)


def explainers() -> dict[str, Any]:
    quanda = require("quanda.explainers.wrappers", "quanda")
    from quanda.explainers import RandomExplainer

    return {f"unde, {name}": explainer(method) for name, method in METHODS.items()} | {
        "captum, similarity of hidden states": partial(quanda.CaptumSimilarity, layers="3", batch_size=100),
        "captum, TracInCP of the last layer": _last_layer(quanda.CaptumTracInCPFast),
        "chance": RandomExplainer,
    }


def _last_layer(made: Any) -> Any:
    def make(model: nn.Module, train_dataset: Any, cache_dir: str, model_id: str) -> Any:
        path = f"{cache_dir}/{model_id}.pt"
        torch.save(model.state_dict(), path)

        def load(model: nn.Module, path: str) -> float:
            model.load_state_dict(torch.load(path, weights_only=True))
            return 1.0

        return made(
            model=model, final_fc_layer=model[-1], train_dataset=train_dataset, checkpoints=[path],
            checkpoints_load_func=load, batch_size=100,
        )  # fmt: skip

    return make


def run(folder: Path) -> dict[str, Any]:
    """{explainer: {metric: {"score", "low", "high"}}}, intervals over queries, or over trainings."""
    require("quanda.metrics", "quanda")
    scores: dict[str, dict[str, list[dict[str, float]]]] = {}
    for seed in range(SEEDS):
        data = digits(WRONG, seed)
        x, given = data.train
        for name, make in explainers().items():
            with tempfile.TemporaryDirectory() as cache:
                row = _measure(make, x, given, data, seed, cache)
            for metric, value in row.items():
                scores.setdefault(name, {}).setdefault(metric, []).append(value)
            print(name, seed, {k: round(v["score"], 3) for k, v in row.items()}, flush=True)
    return {name: {m: _over_seeds(v) for m, v in metrics.items()} for name, metrics in scores.items()}


def _measure(
    make: Any, x: Tensor, given: Tensor, data: Any, seed: int, cache: str
) -> dict[str, dict[str, float]]:
    from quanda.metrics.downstream_eval import (
        ClassDetectionMetric,
        MislabelingDetectionMetric,
        SubclassDetectionMetric,
    )
    from quanda.metrics.heuristics import TopKCardinalityMetric

    queries, labels = data.evaluate
    out = {}

    def explain(y: Tensor, name: str) -> Any:
        model, train = trained(x, y, seed), TensorDataset(x, y)
        options = {} if _plain(make) else {"cache_dir": cache, "model_id": name}
        return model, train, make(model=model, train_dataset=train, **options)

    model, train, asked = explain(data.true_labels, "clean")
    found = asked.explain(test_data=queries, targets=labels)
    metric = ClassDetectionMetric(model=model, train_dataset=train, s=5)
    metric.update(explanations=found, test_targets=labels)
    out["class detection"] = metric.compute_bootstrapped(seed=seed)
    spread = TopKCardinalityMetric(model=model, train_dataset=train, top_k=10)
    spread.update(explanations=found)
    out["cardinality"] = spread.compute()

    pairs = data.true_labels // 2
    model, train, asked = explain(pairs, "pairs")
    metric = SubclassDetectionMetric(
        model=model, train_dataset=train, train_subclass_labels=data.true_labels, s=5
    )
    metric.update(explanations=asked.explain(test_data=queries, targets=labels // 2), test_targets=labels)
    out["subclass detection"] = metric.compute_bootstrapped(seed=seed)

    model, train, asked = explain(given, "wrong")
    metric = MislabelingDetectionMetric(
        model=model,
        train_dataset=train,
        mislabeling_indices=data.mislabelled.nonzero().flatten().tolist(),
        precomputed_self_influence=asked.self_influence(batch_size=100),
    )
    out["mislabeling detection"] = metric.compute()
    return out


def _plain(make: Any) -> bool:
    """Whether an explainer keeps nothing."""
    return getattr(make, "__name__", "") == "RandomExplainer"


def _over_seeds(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean over trainings, and the mean ends of intervals over queries where there are any."""
    score = fmean(row["score"] for row in rows)
    if "ci_low" in rows[0]:
        return {
            "score": score,
            "low": fmean(r["ci_low"] for r in rows),
            "high": fmean(r["ci_high"] for r in rows),
        }
    ends = [row["score"] for row in rows]
    return {"score": score, "low": min(ends), "high": max(ends)}
