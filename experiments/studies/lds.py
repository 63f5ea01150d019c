"""LDS of every method of a bank, unweighted and with weights learned in several ways.

Three disjoint roles: training data, queries that learn weights, queries that evaluate. All settings are the
package's defaults; nothing is chosen on the queries or the retrained models that evaluate. Ways to learn weights:
"top-k", Algorithm 1 of the paper on the learning queries, with k = 5 and a decay of 0.5;
"self-retrieval", from perturbed training examples alone; "both", the mean of these two; "top-k 0.1", the paper's
objective with the fixed k = 3 and decay 0.1 that version 0.1 had. "reference" is fitted to half of the retrained
models and judged, as everything is under "half", on the other half: what weights could do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from experiments.shared import cells
from experiments.shared.cells import Cell
from experiments.shared.sweep import BOOTSTRAP, EVERY_BANK, objective
from unde import Weights, learn_weights
from unde.evaluate import Bank, Estimate, lds, paired
from unde.scoring import GroupScores

PAPER = "Tables 1, 2 and 5"
VARIANTS = EVERY_BANK
COSTS = (1e-4, 1e-3, 3e-3, 1e-2, 1e-1)
STEPS, RATE = 200, 0.05  # of the reference


def run(variant: str) -> dict[str, Any]:
    cell = cells.get(variant)
    methods = {}
    for name in cell.methods:
        methods[name] = _method(cell, name)
        shown = {rule: f"{100 * r['difference']['mean']:+.2f}" for rule, r in methods[name]["rules"].items()}
        print(f"{variant} {name}: {100 * methods[name]['unweighted']['mean']:.2f} {shown}", flush=True)
    return {"methods": methods, "baselines": _baselines(cell)}


def _method(cell: Cell, name: str) -> dict[str, Any]:
    bank, learn, evaluate = cell.bank, cell.learn_scores(name), cell.eval_scores(name)
    index, method = cell.index_for(cell.methods[name]), cell.methods[name]
    found = index.learn_weights(method=method)
    queried = learn_weights(learn)
    mean = Weights((found.values + queried.values) / 2, found.groups)
    rules = {
        "top-k": (queried, None),
        "self-retrieval": (found, found.provenance["refused"]),
        "both": (mean, None),
        "top-k 0.1": (objective(learn), None),
    }
    judge = _Judge(evaluate, bank, split_queries="learn" not in bank.utility)
    out = {
        rule: {**judge(w.values), "groups": w.groups, "note": note, "found": w.provenance.get("found")}
        for rule, (w, note) in rules.items()
    }
    if method.linear:
        fitting, _ = halves(len(bank.masks))
        asked, utility = (
            (learn, bank.utility["learn"]) if "learn" in bank.utility else (evaluate, bank.utility["eval"])
        )
        predicted = predictions(asked, bank.masks[fitting])
        utility = utility[fitting]
        if asked is evaluate:  # no utilities of learning queries: half of the others stand in
            predicted, utility = predicted[:, ::2], utility[:, ::2]
        out["reference"] = judge(fitted(predicted, utility)) | {
            "groups": evaluate.groups,
            "note": None,
        }
    return {"method": str(method), "unweighted": judge.unweighted.as_dict(), "rules": out}


class _Judge:
    """LDS of weights: on all, and on the half that the reference was not fitted to."""

    def __init__(self, scores: GroupScores, bank: Bank, split_queries: bool) -> None:
        self.scores, self.masks, self.utility = scores, bank.masks, bank.utility["eval"]
        self.judging = halves(len(bank.masks))[1]
        self.rows = slice(1, None, 2) if split_queries else slice(None)
        self.unweighted, self.half = self._estimates(torch.ones(len(scores.groups)))

    def __call__(self, weights: torch.Tensor) -> dict[str, Any]:
        all_, half = self._estimates(weights)
        return {
            "weights": weights.tolist(),
            "estimate": all_.as_dict(),
            "difference": paired(self.unweighted, all_).as_dict(),
            "half": paired(self.half, half).as_dict(),
        }

    def _estimates(self, weights: torch.Tensor) -> tuple[Estimate, Estimate]:
        total = self.scores.total(weights)
        half_masks, half_utility = self.masks[self.judging], self.utility[self.judging][:, self.rows]
        return (
            lds(total, self.masks, self.utility, bootstrap=BOOTSTRAP),
            lds(total[self.rows], half_masks, half_utility, bootstrap=BOOTSTRAP),
        )


def _baselines(cell: Cell) -> dict[str, Any]:
    """For texts: BM25 and similarity of representations."""
    if cell.domain != "text":
        return {}
    from experiments.shared.language import baselines

    return {
        name: cell.lds(scores, BOOTSTRAP).as_dict()
        for name, scores in baselines(cell.corpus(), cell.model, cell.corpus().evaluate).items()
    }


# --- the reference -----------------------------------------------------------------------------------------
#
# For each query the correlation, over subsets, of its retrained utility (as ranks) with the weighted sum of what groups
# predict is differentiable in w; its mean over the learning queries is maximised, less a cost of uneven weights that
# two-fold cross-validation over these queries chooses. It is no bound: what is learned from 32 subsets is noisy too.


def halves(subsets: int) -> tuple[np.ndarray, np.ndarray]:
    """Which subsets fit, and which judge."""
    fitting = np.arange(subsets) % 2 == 0
    return fitting, ~fitting


def predictions(scores: GroupScores, masks: np.ndarray) -> Tensor:
    """(S, Q, M): what each group foretells for each subset."""
    members = torch.from_numpy(masks).float()
    out = torch.zeros(len(masks), len(scores), len(scores.groups))
    for start in range(0, len(scores), 32):
        rows = slice(start, min(start + 32, len(scores)))
        for train, part in scores.stream(rows):  # (q, n, M)
            out[:, rows] += torch.einsum("sn,qnj->sqj", members[:, train], part)
    return out


def fitted(predicted: Tensor, utility: np.ndarray, seed: int = 0) -> Tensor:
    """(M,) weights from predictions (S, Q, M) and utilities (S, Q)."""
    ranks = torch.from_numpy(rankdata(utility, axis=0)).double()
    ranks = ranks - ranks.mean(0)
    ranks = ranks / ranks.norm(dim=0).clamp(min=1e-12)
    x = predicted.double() - predicted.double().mean(0)
    x = x / x.norm(dim=0).mean()
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))
    folds = order.chunk(2)
    held_out = [
        sum(
            _correlation(x[:, b] @ _fit(x[:, a], ranks[:, a], cost), ranks[:, b]).item()
            for a, b in (folds, folds[::-1])
        )
        for cost in COSTS
    ]
    return _fit(x, ranks, COSTS[int(np.argmax(held_out))]).float()


def _correlation(predicted: Tensor, ranks: Tensor) -> Tensor:
    return (predicted / predicted.norm(dim=0).clamp(min=1e-12) * ranks).sum(0).mean()


def _fit(x: Tensor, ranks: Tensor, cost: float) -> Tensor:
    groups = x.shape[2]
    raw = torch.zeros(groups, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=RATE)
    for _ in range(STEPS):
        w = groups * raw.softmax(0)
        loss = cost * (w - 1).square().mean() - _correlation(x @ w, ranks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (groups * raw.softmax(0)).detach()
