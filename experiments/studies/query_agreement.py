"""Another label-free objective: a query and a perturbed copy of it should rank training examples alike.

Weights maximise, on average over the learning queries q, the cosine of scores(q, ·; w) and scores(q′, ·; w), q′ a
perturbed copy; scores are centred over queries first, since what is the same for all queries (training examples with
large gradients) agrees without telling anything. The judge is LDS on the evaluation queries; nothing is chosen by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.shared import cells
from experiments.shared.cells import Cell
from experiments.shared.sweep import BOOTSTRAP
from unde.data import Rows
from unde.evaluate import paired
from unde.index.self_retrieval import Copier

PAPER = ""
VARIANTS = ("mnist-resnet", "mnist-vit", "sotu-gpt2", "wikitext-gpt2")
QUERIES, STRENGTHS, COST = 100, (0.2, 0.5), 0.01


def run(variant: str) -> dict[str, Any]:
    cell = cells.get(variant)
    out: dict[str, Any] = {}
    for name in cell.methods:
        evaluate = cell.eval_scores(name)
        before = cell.lds(evaluate.total(), BOOTSTRAP)
        out[name] = {"unweighted": before.as_dict()}
        for strength in STRENGTHS:
            w = agreeing(*_both(cell, name, strength))
            after = cell.lds(evaluate.total(w), BOOTSTRAP)
            out[name][f"strength {strength:g}"] = {"weights": w.tolist(), **paired(before, after).as_dict()}
            print(variant, name, strength, f"{100 * (after.mean - before.mean):+.2f}", flush=True)
    return out


def _both(cell: Cell, name: str, strength: float) -> tuple[Tensor, Tensor]:
    """(Q, N, M) contributions of learning queries and of their copies, centred over queries."""
    method = cell.methods[name]
    index = cell.index_for(method)
    rows, copier = Rows(cell.queries("learn")), Copier(index._state, method, None, seed=0)
    [kind] = copier.kinds
    made = [kind(rows[i], strength, np.random.default_rng([0, i])) for i in range(QUERIES)]
    copies = index.features(Rows(made, index._state.collate))
    pair = [cell.learn_scores(name).contributions(slice(0, QUERIES))]
    pair.append(index.score(copies, method).contributions(slice(0, QUERIES)))
    return tuple(c - c.mean(0, keepdim=True) for c in pair)  # type: ignore[return-value]


def agreeing(a: Tensor, b: Tensor, steps: int = 200, rate: float = 0.05) -> Tensor:
    """(M,) weights of mean one that maximise the mean cosine, less a cost of uneven weights."""
    cross, first, second = (torch.einsum("qnj,qnk->qjk", x, y).double() for x, y in ((a, b), (a, a), (b, b)))
    raw = torch.zeros(a.shape[2], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=rate)

    def form(matrix: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("j,qjk,k->q", w, matrix, w)

    for _ in range(steps):
        w = len(raw) * raw.softmax(0)
        cosine = form(cross, w) / (form(first, w) * form(second, w)).sqrt()
        loss = COST * (w - 1).square().mean() - cosine.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (len(raw) * raw.softmax(0)).detach().float()
