"""The training examples that make up the numerator of the objective, picked while blocks stream by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unde.scoring.blocks import stable_top
from unde.weights.objective import SIDES
from unde.weights.problem import Problem


def select(problem: Problem, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Which training examples count for each query at `weights`, and their mean contributions.

    Returns their indices, (Q', r) and sorted, and a (Q', M) in float64: as long as the indices stay what
    they are, the numerator of query q is a_q·w.
    """
    data = problem.data
    supervised = problem.loss == "supervised"
    sides, k = ((1,), 1) if supervised else (SIDES[problem.loss], problem.k)
    indices, means = [], []
    for span, blocks in data.sweep("selecting", problem.queries, 16 * data.groups * k + 12 * data.examples):
        positives = problem.positives_of(span.places)
        tops: dict[int, _Top] = {}
        for train, block in blocks:
            wanted = span.wanted.to(block.device)
            if positives is None:
                ranking = (block @ weights.to(block))[wanted]  # (q, n)
            else:  # the known positive comes first, and k is 1
                ranking = (torch.arange(train.start, train.stop) == positives[:, None]).to(block)
            for side in sides:
                found = _Top.of(side * ranking, k, train.start, block, wanted)
                tops[side] = found if side not in tops else tops[side].merged(found, k)
        indices.append(torch.cat([tops[side].indices.cpu().sort(1).values for side in sides], dim=1))
        means.append(torch.stack([side * tops[side].rows.cpu().double().mean(1) for side in sides]).sum(0))
    return torch.cat(indices), torch.cat(means)


class _Top(NamedTuple):
    """The k training examples of each query that rank highest so far, of equal ones the earlier."""

    ranking: Tensor  # (q, ≤k)
    indices: Tensor  # (q, ≤k)
    rows: Tensor  # (q, ≤k, M) their contributions

    @classmethod
    def of(cls, ranking: Tensor, k: int, start: int, block: Tensor, wanted: Tensor) -> _Top:
        ranking, columns = stable_top(ranking, min(k, ranking.shape[1]), largest=True)
        return cls(ranking, columns + start, block[wanted[:, None], columns])

    def merged(self, other: _Top, k: int) -> _Top:
        ranking, indices, rows = (torch.cat(pair, dim=1) for pair in zip(self, other))
        ranking, keep = stable_top(ranking, min(k, ranking.shape[1]), largest=True)
        return _Top(ranking, indices.gather(1, keep), rows.take_along_dim(keep[..., None], dim=1))
