"""An exact look at the objective: its value and slope at some weights, and the training examples that matter most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def rows(self, loss: str) -> int:
        """Of each query."""
        sides = len(SIDES[loss])
        return (sides * self.ranks or 1) + (2 - sides) * self.ends + self.random.shape[1]

    @property
    def reach(self) -> int:
        """Ranks that the selectable ones stand for."""
        return self.stride * self.ranks


@dataclass(frozen=True)
class Rows:
    """Contributions of some training examples over the norm of a query's scores.

    Those of each side (`ranks` each, or the one positive), then of the ends, then random ones. What is not kept is read
    while it streams by; what is, when it is needed.
    """

    problem: Problem
    picks: Tensor  # (Q', r) training examples
    size: Tensor  # (Q', 1) norms
    between: Tensor  # (Q', s) bool: the random ones that lie between what the other rows stand for
    rest: int  # how many training examples do
    read: Tensor | None  # (Q', r, M)

    @property
    def values(self) -> Tensor:
        """(Q', r, M)"""
        if self.read is not None:
            return self.read
        return self.problem.data.rows(self.problem.queries, self.picks).div_(self.size[:, :, None])


@dataclass(frozen=True)
class Ask:
    """For the objective at some weights; with a draw, for its slope and rows, too."""

    problem: Problem
    weights: Array
    draw: Draw | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What the answer depends on beside the queries: draws of problems alike are alike."""
        problem = self.problem
        return problem.k, problem.loss, id(problem.positives), self.weights.tobytes(), self.draw is None


@dataclass
class Look:
    """The objective of each query at some weights, exactly; its slopes and rows, if asked for."""

    weights: Array
    rho: Array  # (Q',)
    slopes: Array  # (Q', M)
    rows: Rows | None = None

    @property
    def slope(self) -> Array:
        """Of the mean."""
        return self.slopes.mean(0)


def looks(asked: Sequence[Ask]) -> list[Look]:
    """What is asked about problems of the same queries, in one pass over them; what is asked twice, once."""
    distinct = {a.key: a for a in asked}
    found = dict(zip(distinct, _looks(list(distinct.values()))))
    return [found[a.key] for a in asked]


def _looks(asked: Sequence[Ask]) -> list[Look]:
    problem = asked[0].problem
    data, queries, groups = problem.data, len(problem.queries), problem.data.groups
    found = [Look(a.weights, np.zeros(queries), np.zeros((queries if a.draw else 0, groups))) for a in asked]
    # Each of the weights once; those that slopes are asked of come first.
    order = sorted(asked, key=lambda a: a.draw is None)
    columns = {a.weights.tobytes(): torch.from_numpy(a.weights / data.unit).float() for a in order}
    place = {key: i for i, key in enumerate(columns)}
    close = len({a.weights.tobytes() for a in asked if a.draw is not None})
    drawn = 0 if data.kept else max((a.draw.rows(a.problem.loss) for a in asked if a.draw), default=0)
    each = 4 * data.examples * (len(columns) + 4) + 8 * drawn * groups  # all scores, and what one ask takes
    for span in data.spans("looking", problem.queries, each):
        turned: list[Tensor] = []
        if data.kept and close:
            scores, turned = data.turned(span, list(columns.values()), close)
        else:
            scores = data.scores(span, list(columns.values()))
        for a, look in zip(asked, found):
            column = place[a.weights.tobytes()]
            now = _Scored(a.problem, span.places, scores[column], a.draw)
            look.rho[span.places] = now.rho
            if a.draw is not None:
                _closer(a.problem, a.draw, span, now, look, turned[column] if turned else None)
    return found


def _closer(
    problem: Problem, draw: Draw, span: Span, now: _Scored, look: Look, turned: Tensor | None
) -> None:
    """Slopes and rows of the queries of a span."""
    data, random, queries = problem.data, draw.random[span.places], len(look.rho)
    picks, size = torch.cat([*now.chosen, *now.ends, random], dim=1), now.norm * data.unit
    if look.rows is None:
        read = None if data.kept else torch.empty(queries, picks.shape[1], data.groups)
        between = torch.empty(queries, random.shape[1], dtype=torch.bool)
        every = torch.empty(queries, picks.shape[1], dtype=picks.dtype)
        look.rows = Rows(problem, every, torch.empty(queries, 1), between, now.rest, read)
    if turned is None:
        assert look.rows.read is not None
        sums, rows = data.pulled(span, now.pull(), picks)
        torch.div(rows, size[:, :, None].float(), out=look.rows.read[span.places])
    else:
        sums = turned.double() * now.back / now.norm
        for share, chosen in now.forth:
            sums += share * data.added(span.which, chosen)
    look.slopes[span.places] = (sums.double() / size).numpy()
    look.rows.picks[span.places], look.rows.size[span.places] = picks, size.float()
    look.rows.between[span.places] = now.between(random)


class _Scored:
    """Scores of some queries over their norms, and what they select."""

    def __init__(self, problem: Problem, places: slice, scores: Tensor, draw: Draw | None) -> None:
        norm = scores.double().square_().sum(1, keepdim=True).sqrt_()  # (q, 1)
        self.norm = torch.where(norm > 0, norm, 1.0)
        self.scores = scores = scores * (1 / self.norm).float()
        positives = problem.positives_of(places)
        sides = () if positives is not None else SIDES[problem.loss]
        if draw is None:
            ends = {side: scores.topk(problem.k, dim=1, largest=side > 0).indices for side in sides}
        else:
            covered = {side: draw.reach if side in sides else draw.ends for side in (1, -1)}
            ends = {side: scores.topk(covered[side], dim=1, largest=side > 0).indices for side in (1, -1)}
            self.rest = scores.shape[1] - sum(covered.values())
            self.chosen = [ends[side][:, draw.stride // 2 :: draw.stride] for side in sides]
            self.ends = [ends[side] for side in (1, -1) if side not in sides]
            self._high, self._low = (scores.gather(1, ends[side][:, -1:]) for side in (1, -1))
        selected = [(side, ends[side][:, : problem.k]) for side in sides]
        if positives is not None:
            selected, self.chosen = [(1, positives[:, None])], [positives[:, None]]
        rho = torch.stack([side * scores.gather(1, rows).double().mean(1) for side, rows in selected]).sum(0)
        self.rho = rho.numpy()
        # The slope of rho, times the norm: `back` times contributions by their scores, and shares of selected ones.
        self.back = -rho[:, None]  # (q, 1)
        self.forth = [(side / rows.shape[1], rows) for side, rows in selected]

    def pull(self) -> Tensor:
        """(q, N): Σ_n pull[n] C[n] is the slope of rho, times the norm."""
        pull = self.scores * self.back.float()
        for share, rows in self.forth:
            pull.scatter_add_(1, rows, torch.full(rows.shape, share))
        return pull

    def between(self, random: Tensor) -> Tensor:
        """(q, s) bool: random training examples that neither side nor end stands for."""
        scores = self.scores.gather(1, random)
        return (scores < self._high) & (scores > self._low)
