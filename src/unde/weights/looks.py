"""An exact look at the objective: its value and slope at some weights, and the training examples that matter most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unde.weights.contributions import Span
from unde.weights.objective import SIDES
from unde.weights.problem import Problem

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Draw:
    """Which contributions of each query are looked at one by one.

    Of those that may be selected, every `stride`-th by rank, from the first to about the 2k-th; some at the ends of the
    ranking, which make up much of the norm; and the same random ones each time, which stand for all between.
    """

    stride: int
    ranks: int  # of the selectable ones, on each side that the objective has
    ends: int
    random: Tensor  # (Q', s) training examples

    @property
    def rows(self) -> int:
        """Of each query, at most."""
        return 2 * (self.ranks + self.ends) + self.random.shape[1]

    @property
    def reach(self) -> int:
        """Ranks that the selectable ones stand for."""
        return self.stride * self.ranks


@dataclass(frozen=True)
class Rows:
    """Contributions of some training examples over the norm of a query's scores.

    Those of each side (`ranks` each, or the one positive), then of the ends, then random ones.
    """

    values: Tensor  # (Q', r, M)
    between: Tensor  # (Q', s) bool: the random ones that lie between what the other rows stand for
    rest: int  # how many training examples do


class Look:
    """The objective of each query at some weights, exactly; its slope and rows, as costly again, when asked for."""

    def __init__(self, problem: Problem, weights: Array, draw: Draw, unweighted: bool = False) -> None:
        self.weights, self._problem, self._draw = weights, problem, draw
        data, queries = problem.data, len(problem.queries)
        self.rho = np.zeros(queries)
        self.unweighted = np.zeros(queries)  # (Q',) of uniform weights, if asked for
        # Scores stay for the slope if they fit.
        self._kept: dict[int, _Scored] | None = (
            {} if 4 * queries * data.examples <= data.memory // 8 else None
        )
        uniform = bool((weights == 1).all())
        for span in self._spans("looking"):
            if uniform:
                (scores,) = data.unweighted(span)
            elif unweighted:
                plain, scores = data.unweighted(span, [self._asked])
                self.unweighted[span.places] = _Scored(problem, span.places, plain, draw).rho
            else:
                (scores,) = data.scores(span, [self._asked])
            scored = _Scored(problem, span.places, scores, draw)
            self.rho[span.places] = scored.rho
            if self._kept is not None:
                self._kept[span.places.start] = scored
        if uniform:
            self.unweighted = self.rho

    @property
    def _asked(self) -> Tensor:
        return torch.from_numpy(self.weights).float()

    def _spans(self, label: str) -> Iterator[Span]:
        data = self._problem.data
        each = 24 * data.examples + 8 * self._draw.rows * data.groups
        return data.spans(label, self._problem.queries, each)

    @cached_property
    def told(self) -> tuple[Array, Rows]:
        """The slope of the mean objective, (M,), and rows."""
        data, slope = self._problem.data, torch.zeros(self._problem.data.groups, dtype=torch.float64)
        values, between, rest = torch.empty(0), [], 0
        for span in self._spans("looking closer"):
            now = None if self._kept is None else self._kept.pop(span.places.start)
            if now is None:
                now = _Scored(self._problem, span.places, data.scores(span, [self._asked])[0], self._draw)
            random = self._draw.random[span.places]
            picks = torch.cat([*now.chosen, *now.ends, random], dim=1)
            sums, contributions = data.pulled(span, now.pull(), picks)
            slope += (sums.double() / now.unit).sum(0)
            size = now.unit * torch.where(now.norm > 0, now.norm, 1.0)[:, None]  # (q, 1)
            if not len(values):
                values = torch.empty(len(self.rho), picks.shape[1], data.groups)
            torch.div(contributions, size[:, :, None].float(), out=values[span.places])
            between.append(now.between(random))
            rest = now.rest
        mean = (slope / len(self.rho)).numpy()
        return mean, Rows(values, torch.cat(between), rest)


class _Scored:
    """Scores of some queries, over a unit in which squares neither overflow nor vanish, and what they select."""

    def __init__(self, problem: Problem, places: slice, scores: Tensor, draw: Draw) -> None:
        unit = scores.abs().amax(1, keepdim=True)  # (q, 1)
        unit = torch.where(unit > 0, unit, 1.0)
        scores = scores / unit
        self.scores, self.unit = scores, unit.double()
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
        numerator = torch.stack(
            [side * scores.gather(1, rows).double().mean(1) for side, rows in self._selected]
        )
        self._rho = numerator.sum(0) * self._inverse
        self.rho = self._rho.numpy()

    def pull(self) -> Tensor:
        """(q, N): Σ_n pull[n] C[n] is the slope of rho, but for the unit."""
        pull = self.scores * (-self._rho * self._inverse**2).float()[:, None]
        for side, rows in self._selected:
            share = (side / self._share * self._inverse).float()[:, None]
            pull.scatter_add_(1, rows, share.expand(-1, rows.shape[1]))
        return pull

    def between(self, random: Tensor) -> Tensor:
        """(q, s) bool: random training examples that neither side nor end stands for."""
        scores = self.scores.gather(1, random)
        return (scores < self._high) & (scores > self._low)
