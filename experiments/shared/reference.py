"""What weights could do: w ≥ 0 fitted to retrained models, half of them, and judged on the others.

For each query the correlation, over subsets, of its retrained utility (as ranks) with the weighted sum of what groups
predict is differentiable in w; its mean over the learning queries is maximised, less a cost of uneven weights that
two-fold cross-validation over these queries chooses. It is no bound: what is learned from 32 subsets is noisy too.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from unde.scoring import GroupScores

COSTS = (1e-4, 1e-3, 3e-3, 1e-2, 1e-1)
STEPS, RATE = 200, 0.05


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
