"""LDS of every method of a bank under several sets of weights: what most studies of the paper's appendix are.

Columns of such a study are there to be looked at, not to choose from: nothing is tuned on what they show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from experiments.shared import cells
from experiments.shared.cells import Cell
from unde import Weights, learn_weights
from unde.evaluate import paired
from unde.scoring import GroupScores
from unde.scoring.data_splits import refuse_seen

EVERY_BANK = (
    "mnist-resnet",
    "mnist-vit",
    "cifar10-resnet",
    "cifar10-vit",
    "finetuned-resnet",
    "sotu-gpt2",
    "wikitext-gpt2",
    "finetuned-gpt2",
    "cifar2",
    "robots",
)
BOOTSTRAP = 1000

# (cell, name of a method) → {column: weights}
Learned = Callable[[Cell, str], Mapping[str, Weights]]


def objective(scores: GroupScores, **given: Any) -> Weights:
    """The paper's objective with the solver, the k and the decay that version 0.1 had unless others are `given`."""
    fast = scores.method.linear and given.get("objective") != "no-norm"
    usual = {"k": 3, "weight_decay": 0.1, "solver": "fixed-point"} if fast else {"k": 3, "weight_decay": 1.0}
    return learn_weights(scores, **(usual | given))


@cache
def objective_of(cell: Cell, title: str) -> Weights:
    return objective(cell.learn_scores(title))


def sweep(bank: str, learned: Learned) -> dict[str, Any]:
    """{method: {"unweighted": estimate, "columns": {column: {"estimate", "difference"}}}}, estimates as fractions."""
    cell = cells.get(bank)
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
