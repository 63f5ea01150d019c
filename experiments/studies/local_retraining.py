"""Short fine-tuning on random halves, from the attributed model: can it stand in for retraining from scratch?

LDS needs models that were retrained from scratch, which hardly any user can afford. Here the attributed model is
trained on for one epoch on each of 32 random halves, at a small rate, and LDS is taken against that. The question is
not whether the two LDS are equal, but whether they rank methods and dampings alike: Spearman's correlation over
all settings of a bank.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from experiments.shared import cells
from experiments.shared.cells import Cell
from experiments.shared.paths import RUNS
from unde.data import Rows
from unde.evaluate import Bank, lds

PAPER = ""
VARIANTS = ("mnist-resnet", "mnist-vit", "sotu-gpt2", "finetuned-gpt2")
SUBSETS, BATCH = 32, 64
RATE = {"images": 1e-3, "text": 3e-4}
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


def run(variant: str) -> dict[str, Any]:
    cell = cells.get(variant)
    full = cell.bank
    local = Bank.run(
        RUNS / f"{variant}-local.npz",
        train=lambda indices, seed: trained_on(cell, indices, seed),
        utility=lambda model: losses(cell, model),
        n_train=full.masks.shape[1],
        subsets=SUBSETS,
        seed=1,
        name=f"{variant}, one epoch more",
    )
    rows = {}
    for name in cell.methods:
        for title, (_, method) in cell.damped(name, DAMPINGS).items():
            total = cell.scores(method, "eval").total()
            rows[title] = {
                "full": cell.lds(total).as_dict(),
                "local": lds(total, local.masks, local.utility["queries"]).as_dict(),
            }
    means = np.array([[r[k]["mean"] for k in ("full", "local")] for r in rows.values()])
    return {
        "settings": rows,
        "spearman": float(spearmanr(means[:, 0], means[:, 1])[0]),
        "seconds a model": {"full": float(full.seconds.mean()), "local": float(local.seconds.mean())},
    }


def trained_on(cell: Cell, indices: np.ndarray, seed: int) -> nn.Module:
    """A copy of the attributed model after one more epoch on some examples; BatchNorm stays as it is."""
    model, task, rows = copy.deepcopy(cell.model).eval(), cell.task(), Rows(cell.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE[cell.domain], weight_decay=0.0)
    order = np.random.default_rng(seed).permutation(indices)
    for start in range(0, len(order), BATCH):
        batch = rows.batch(int(i) for i in order[start : start + BATCH])
        optimizer.zero_grad()
        task.loss(model, batch).mean().backward()
        optimizer.step()
    return model


@torch.no_grad()
def losses(cell: Cell, model: nn.Module) -> Tensor:
    rows, task = Rows(cell.queries("eval")), cell.task()
    parts = [range(a, min(a + 64, len(rows))) for a in range(0, len(rows), 64)]
    return torch.cat([-task.loss(model, rows.batch(part)) for part in parts])
