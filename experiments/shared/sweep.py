"""LDS of every method of a bank under several sets of weights: what most studies of the paper's appendix are.

Columns of such a study are there to be looked at, not to choose from: nothing is tuned on what they show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from experiments.shared.cells import Cell
from unde import Weights, learn_weights
from unde.evaluate import paired
from unde.evaluate.search import DECAYS, KS
from unde.scoring import GroupScores
from unde.scoring.data_splits import refuse_seen
from unde.weights.adamw import adamw
from unde.weights.contributions import Contributions
from unde.weights.learn import ADAMW, EPOCHS, LEARNING_RATE, WEIGHT_DECAY, K
from unde.weights.objective import WeightProblem

EVERY_BANK = (
    "mnist-resnet",
    "mnist-vit",
    "cifar10-resnet",
    "cifar10-vit",
    "finetuned-resnet",
    "finetuned-vit",
    "sotu-gpt2",
    "wikitext-gpt2",
    "finetuned-lora",
    "finetuned-gpt2",
    "cifar2",
    "robots",
    "finetuned-unet",
)
BOOTSTRAP = 200
DECAY = WEIGHT_DECAY[ADAMW]  # with K, the point that is the same for all cells
FEWER = (
    (5, 20, 100, 500),
    (0.1, 0.5, 1.0),
)  # of methods whose scores are no sums over groups: each step is dear

# (cell, name of a method) → {column: weights}
Learned = Callable[[Cell, str], Mapping[str, Weights]]


def grid(scores: GroupScores) -> list[tuple[int, float]]:
    """(k, λ′) that are searched for these scores; the point that is the same for all is one of them."""
    ks, decays = (KS, DECAYS) if scores.method.linear else FEWER
    points = {(k, d) for k in ks if k <= scores.shape[1] for d in decays} | {(K, DECAY)}
    return sorted(points)


def candidates(scores: GroupScores, points: Sequence[tuple[int, float]]) -> Tensor:
    """(C, M): weights by Algorithm 1 at each (k, λ′), all in one pass over the contributions."""
    data = Contributions(scores)
    everything = torch.arange(data.queries)
    problems = [WeightProblem(data, everything, k, "top-k") for k, _ in points]
    fits = adamw(problems, [d for _, d in points], epochs=EPOCHS, lr=LEARNING_RATE)
    return torch.stack([f.weights for f in fits]).float()


@cache
def objective_of(cell: Cell, title: str) -> Weights:
    """Of Algorithm 1 at the point that is the same for all cells."""
    return learn_weights(cell.learn_scores(title))


def sweep(cell: Cell, learned: Learned) -> dict[str, Any]:
    """{method: {"unweighted": estimate, "columns": {column: {"estimate", "difference"}}}}, estimates as fractions."""
    results: dict[str, Any] = {}
    for title in cell.methods:
        scores = cell.eval_scores(title)
        plain = cell.lds(scores.total(), BOOTSTRAP)
        row = results[title] = {"unweighted": plain.as_dict(), "columns": {}}
        print(f"{title:14}unweighted {100 * plain.mean:.2f}", flush=True)
        for column, weights in learned(cell, title).items():
            refuse_seen(scores.query_digests, weights)
            weighted = cell.lds(scores.total(weights), BOOTSTRAP)
            difference = paired(plain, weighted)
            row["columns"][column] = {"estimate": weighted.as_dict(), "difference": difference.as_dict()}
            print(f"{'':14}{column} {100 * weighted.mean:.2f} ({100 * difference.mean:+.2f})", flush=True)
    return results
