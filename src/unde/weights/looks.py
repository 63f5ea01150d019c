"""An exact look at the objective: its value and slope at some weights, and the training examples that matter most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unde.weights.objective import SIDES
from unde.weights.problem import Problem

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Draw:
    """Which contributions of each query are looked at one by one.

    Of those that may be selected, every `stride`-th by rank, from the first to about the 2k-th; as many `ends` of either
    end as make up much of the norm; and the same random ones each time, which stand for all between.
    """

    stride: int
    ranks: int  # of the selectable ones, on each side that the objective has
    ends: int
    random: Tensor  # (Q', s) training examples

    @property
    def reach(self) -> int:
        """Ranks that the selectable ones stand for."""
        return self.stride * self.ranks


@dataclass(frozen=True)
class Look:
    """The objective of each query at some weights, exactly, and rows of contributions over the norm of its scores.

    The rows are those of each side (`ranks` each, or the one positive), then of both ends, then random ones.
    """

    rho: Array  # (Q',)
    slope: Array  # (M,) of the mean of rho
    rows: Tensor  # (Q', r, M)
    between: Tensor  # (Q', s) bool: the random ones that lie between what the other rows stand for
    rest: int  # how many training examples do
    unweighted: Array | None = None  # (Q',) rho of uniform weights, if asked for


def look(problem: Problem, weights: Array, draw: Draw, unweighted: bool = False) -> Look:
    """One pass over the contributions, which are read twice."""
    data, queries = problem.data, len(problem.queries)
    rho, plain, slope = np.zeros(queries), np.zeros(queries), torch.zeros(data.groups, dtype=torch.float64)
    rows, between, rest = [], [], 0
    asked = [torch.from_numpy(weights).float()] + [torch.ones(data.groups)] * unweighted
    # Scores, pulls and picked rows of a span.
    each = 24 * data.examples + 8 * (4 * draw.ranks + draw.random.shape[1]) * data.groups
    for span in data.spans("looking", problem.queries, each):
        found = [_Scored(problem, span.places, s, draw) for s in data.scores(span, asked)]
        now = found[0]
        picks = torch.cat([*now.chosen, *now.ends, draw.random[span.places]], dim=1)
        sums, contributions = data.pulled(span, now.pull(), picks)
        rho[span.places] = now.rho.numpy()
        plain[span.places] = found[-1].rho.numpy()
        slope += (sums.double() / now.unit).sum(0)
        size = now.unit * torch.where(now.norm > 0, now.norm, 1.0)[:, None]  # (q, 1)
        rows.append(contributions.div_(size[:, :, None].float()))
        between.append(now.between(draw.random[span.places]))
        rest = now.rest
    mean = (slope / queries).numpy()
    return Look(rho, mean, torch.cat(rows), torch.cat(between), rest, plain if unweighted else None)


class _Scored:
    """Scores of some queries, over a unit in which squares neither overflow nor vanish, and what they select."""

    def __init__(self, problem: Problem, places: slice, scores: Tensor, draw: Draw) -> None:
        unit = scores.abs().amax(1, keepdim=True)  # (q, 1)
        unit = torch.where(unit > 0, unit, 1.0)
        self.scores, self.unit = scores.div_(unit), unit.double()
        self.norm = torch.linalg.vector_norm(scores, dim=1, dtype=torch.float64)  # (q,)
        self._inverse = torch.where(self.norm > 0, 1 / self.norm, 0.0)
        positives = problem.positives_of(places)
        self._share = 1 if positives is not None else problem.k
        sides = () if positives is not None else SIDES[problem.loss]
        covered = {side: draw.reach if side in sides else draw.ends for side in (1, -1)}
        ends = {side: scores.topk(covered[side], dim=1, largest=side > 0).indices for side in (1, -1)}
        if positives is not None:
            self._selected = [(1, positives[:, None])]
            self.chosen = [positives[:, None]]
        else:
            self._selected = [(side, ends[side][:, : problem.k]) for side in sides]
            self.chosen = [ends[side][:, draw.stride // 2 :: draw.stride] for side in sides]
        self.ends = [ends[side] for side in (1, -1) if side not in sides]
        self._high, self._low = (scores.gather(1, ends[side][:, -1:]) for side in (1, -1))
        self.rest = scores.shape[1] - sum(covered.values())
        numerator = torch.stack([side * scores.gather(1, rows).double().mean(1) for side, rows in self._selected])
        self.rho = numerator.sum(0) * self._inverse

    def pull(self) -> Tensor:
        """(q, N): Σ_n pull[n] C[n] is the slope of rho, but for the unit."""
        pull = self.scores * (-self.rho * self._inverse**2).float()[:, None]
        for side, rows in self._selected:
            share = (side / self._share * self._inverse).float()[:, None]
            pull.scatter_add_(1, rows, share.expand(-1, rows.shape[1]))
        return pull

    def between(self, random: Tensor) -> Tensor:
        """(q, s) bool: random training examples that neither side nor end stands for."""
        scores = self.scores.gather(1, random)
        return (scores < self._high) & (scores > self._low)
