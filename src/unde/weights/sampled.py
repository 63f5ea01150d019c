"""The fixed-point solver on a sample, for problems whose matrices G_q = C_qᵀ C_q would cost many passes over the data.

A look (`looks`) gives the objective and its slope at w exactly. How it goes on from there is told by a model of it that
is made of some rows of every C_q: those at the ends of the ranking, which may be selected and which make up much of the
norm, as they are; and random ones, which stand for all between. In the model

    ρ_q(x) = ρ_q(w) + top(x) / ‖R_q x‖ − top(w) / ‖R_q w‖,

top the mean of the k highest among the rows that may be selected, R_q all rows, each weighed by the root of how many it
stands for, with ‖R_q w‖ set to its true value. So values are exact at w, and rows are selected anew as x moves. A slope
δ·x / ‖R x‖ is added that makes the slope of the model at w the exact one. The model is climbed by the fixed-point
iteration, with H from the same rows, and the next look is at its top.

Such a model need not be good: the error after a look is the one before times the relative error of H. A look that is
lower than the last is taken back half way. When the way up that is left is less than a ten-thousandth of the objective,
this ends. So does it after a short step about which the model was right to a twentieth, since what is left goes with
the square of that; one query in eight is enough to tell: all tell the slope, and these how far the objective stays
behind it. One or two looks at all queries are usual. J may have several tops, for small k above all: this one need not
be that of the exact solver.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unde.weights.looks import Ask, Draw, Look, looks
from unde.weights.nnls import nonnegative_minimum, product, units
from unde.weights.objective import SIDES
from unde.weights.problem import Problem, nothing_to_learn

Array = NDArray[np.float64]

_WORTH, _GROUPS = 2e9, 64  # multiplications in the matrices G_q, and groups, from which on a sample pays
_SHARES = (2, 1, 2)  # of the rows of a query: what may be selected, ends, and random ones
_ROWS = 170  # for each group, of all queries together
_SHARE, _FEW = 16, 4  # rows of a query that are a share: at least, and where memory is short
_LOOKS = 20  # at most
_LEFT = 1e-4  # of the objective: a way up that is shorter is left
_SOON = 50  # a model that was right about a step of so many times that is believed that it was the last
_RIGHT = 20  # which it was if it was off by less than one part of the rise in so many
_PART = 8  # a start is found on one query in so many, and rows take at most this fraction of the budget
_FEWEST = 48  # queries to find a start on
_INNER = 16  # steps on one model at most
_BEND = 2.0  # a step makes H at most so many times as stiff, or as soft
_FAR = 0.03  # a rise after which H is made anew
_PROXIMAL = 1e-7
_ROUNDING = 1e-24  # groups whose squares are smaller than this next to others' hold nothing but rounding
_LENGTHS = (0.25, 0.5, 1.0)
_LONGER = (1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class Climb:
    """Where it ended, the objective of each look, of which some queries may tell the last, and whether it is a top."""

    weights: Array
    unweighted: Array  # (Q',)
    curve: list[float]
    converged: bool


def pays(problem: Problem, kept: bool) -> bool:
    """Whether a sample is much smaller than the whole and fits, and the matrices G_q are costly, or not `kept`."""
    data, queries = problem.data, len(problem.queries)
    if data.groups < _GROUPS or (kept and queries * data.examples * data.groups**2 < _WORTH):
        return False
    draw = _draw(problem, _ROWS)
    return draw.ends >= _FEW and data.examples >= 4 * max(draw.rows(problem.loss), draw.reach)


def climb(problems: Sequence[Problem], weight_decays: Sequence[float]) -> list[Climb]:
    """Weights of problems with the same queries: as many look at once as there is room for what stays."""
    data, queries = problems[0].data, len(problems[0].queries)
    row = 8 if data.kept else 4 * data.groups  # bytes that stay of it between looks
    most = max(queries * (row * _draw(p, _ROWS).rows(p.loss) + 8 * data.groups) for p in problems)
    together = max(1, data.memory // (_PART * most))
    found: list[Climb] = []
    for first in range(0, len(problems), together):
        some = slice(first, first + together)
        found += _side_by_side([_way(*both) for both in zip(problems[some], weight_decays[some])])
    return found


Way = Generator[list[Ask], list[Look], Climb]


def _side_by_side(ways: Sequence[Way]) -> list[Climb]:
    """All to their ends; of those that ask about the same queries, looks are made in one pass."""
    found: dict[int, Climb] = {}
    asked = {i: next(way) for i, way in enumerate(ways)}
    while asked:
        count = min(len(asks[0].problem.queries) for asks in asked.values())
        turn = {i: asks for i, asks in asked.items() if len(asks[0].problem.queries) == count}
        told = iter(looks([a for asks in turn.values() for a in asks]))
        for i, asks in turn.items():
            try:
                asked[i] = ways[i].send([next(told) for _ in asks])
            except StopIteration as end:
                found[i] = end.value
                del asked[i]
    return [found[i] for i in range(len(ways))]


def _way(problem: Problem, weight_decay: float) -> Way:
    """From a start that some of the queries told, by looks and models."""
    some, draw = _some(problem), _draw(problem, _ROWS)
    w = np.ones(problem.data.groups) if some is None else (yield from _start(some, weight_decay))
    asked = [Ask(problem, w, draw)] + ([] if some is None else [Ask(problem, np.ones(len(w)))])
    now, *beside = yield asked
    plain = beside[0] if beside else now
    unweighted, scale = plain.rho, float(np.abs(plain.rho).mean())
    if scale == 0:
        raise nothing_to_learn()
    goal = Goal(scale, weight_decay)
    value, curve, h = goal.value(now.rho, w), [float(now.rho.mean())], None
    while len(curve) < _LOOKS:
        left = _LEFT * abs(value)
        if h is not None and goal.way_left(now, h) < left:
            return Climb(now.weights, unweighted, curve, True)
        target, rise, h = _top(problem, goal, draw, now)
        if rise < left:
            return Climb(now.weights, unweighted, curve, True)
        soon, close = rise < _SOON * left, max(left, rise / _RIGHT)
        if soon and some is not None:
            (seen,) = yield [Ask(some, target)]
            mean = _told_by_some(now, seen, target)
            if abs(mean / scale - goal.penalty(target) - value - rise) < close:
                return Climb(target, unweighted, [*curve, mean], True)
        for _ in range(3):
            (found,) = yield [Ask(problem, target, None if soon and not problem.data.kept else draw)]
            if (reached := goal.value(found.rho, target)) >= value:
                break
            target = (now.weights + target) / 2
        else:
            return Climb(now.weights, unweighted, curve, False)
        as_foretold = soon and abs(reached - value - rise) < close
        now, value = found, reached
        curve.append(float(now.rho.mean()))
        if as_foretold:
            return Climb(now.weights, unweighted, curve, True)
        if now.rows is None:
            (now,) = yield [Ask(problem, now.weights, draw)]
    return Climb(now.weights, unweighted, curve, False)


def _some(problem: Problem) -> Problem | None:
    """The problem of one query in eight; None where these cost as much as all queries."""
    queries = problem.queries
    if not problem.data.picks_queries or len(queries) < 4 * _FEWEST:
        return None
    return replace(problem, queries=queries[:: min(_PART, len(queries) // _FEWEST)])


def _start(some: Problem, weight_decay: float) -> Generator[list[Ask], list[Look], Array]:
    """By two models."""
    w, draw = np.ones(some.data.groups), _draw(some, _ROWS // 4)
    (now,) = yield [Ask(some, w, draw)]
    goal = Goal(float(np.abs(now.rho).mean()), weight_decay)
    if goal.scale == 0:
        return w
    w, *_ = _top(some, goal, draw, now)
    (now,) = yield [Ask(some, w, draw)]
    w, *_ = _top(some, goal, draw, now)
    return w


def _top(problem: Problem, goal: Goal, draw: Draw, now: Look) -> tuple[Array, float, Array]:
    """That of the model, with its rise and H; rows go."""
    model = Model(problem, goal, draw, now)
    return *model.top(), model.h


def _told_by_some(now: Look, seen: Look, target: Array) -> float:
    """The mean objective at a target near by: all queries tell its slope, some by how much it falls behind that."""
    step, each = target - now.weights, -(-len(now.rho) // len(seen.rho))
    behind = seen.rho - now.rho[::each] - product(now.slopes[::each], step)
    return float(now.rho.mean() + now.slope @ step + behind.mean())


def _draw(problem: Problem, rows: int) -> Draw:
    """About `rows` for each group, the same for the same shape."""
    queries, data = len(problem.queries), problem.data
    share = max(_SHARE, rows * data.groups // (sum(_SHARES) * queries))
    sides = max(1, len(SIDES[problem.loss]))
    each = (
        4 * data.groups * (sides * _SHARES[0] + 2 * _SHARES[1] + _SHARES[2])
    )  # bytes of a share of each kind
    share = min(share, data.memory // (_PART * queries * each))
    ranks, ends, drawn = (share * s for s in _SHARES)
    stride = 1 if problem.loss == "supervised" else -(-2 * problem.k // max(1, ranks))
    generator = torch.Generator().manual_seed(0)
    return Draw(stride, ranks, ends, torch.randint(data.examples, (queries, drawn), generator=generator))


@dataclass(frozen=True)
class Goal:
    """J of `fixed_point`: F / F₁ − λ′/2 · V."""

    scale: float  # F₁
    weight_decay: float

    def value(self, rho: Array, w: Array) -> float:
        return float(rho.mean()) / self.scale - self.penalty(w)

    def penalty(self, w: Array) -> float:
        return self.weight_decay / 2 * (float(w @ w) / len(w) / float(w.mean()) ** 2 - 1)

    def pull(self, w: Array) -> Array:
        """The slope of −λ′/2 · V for any scale of w, at one of mean 1."""
        return self.weight_decay / len(w) * (float(w @ w) / len(w) - w)

    def way_left(self, now: Look, h: Array) -> float:
        """How much higher the top is than a look, as its slope and some H tell."""
        slope = now.slope / self.scale + self.pull(now.weights)
        return float(slope @ (_minimum(h, slope, now.weights) - now.weights)) / 2


def _minimum(h: Array, slope: Array, w: Array) -> Array:
    slope = np.where(np.diag(h) > 0, slope, 0.0)
    target = nonnegative_minimum(h, slope + product(h, w), w, units(h), _PROXIMAL)
    return target if target.any() else w


class Model:
    """J near w, of some rows."""

    def __init__(self, problem: Problem, goal: Goal, draw: Draw, now: Look) -> None:
        rows = now.rows
        assert rows is not None
        self.goal, self.start, self.rows = goal, now.weights, rows.values
        sides = SIDES[problem.loss] or (1,)
        width = 1 if problem.loss == "supervised" else draw.ranks
        self._sides = [(side, slice(i * width, (i + 1) * width)) for i, side in enumerate(sides)]
        self._top = 1 if problem.loss == "supervised" else max(1, round(problem.k / draw.stride))
        drawn = rows.between.shape[1]
        counts = torch.ones(self.rows.shape[:2], dtype=torch.float64)  # (Q', r)
        counts[:, : width * len(sides)] = 0 if problem.loss == "supervised" else draw.stride
        counts[:, -drawn:] = rows.between * (rows.rest / rows.between.sum(1, keepdim=True).clamp(min=1))
        self.counts = counts
        self.here = self._scores(self.start)  # (Q', r)
        squares = (counts * self.here**2).sum(1)  # (Q',)
        self._size = torch.where(squares > 0, 1 / squares, 0.0)  # makes norms 1 at w
        self._delta = np.zeros(len(self.start))
        self.slope = now.slope / goal.scale + goal.pull(self.start)
        self._delta = self.slope - self._slope(self.start, self.here)
        self.h = self._curvature(self.here)

    def top(self) -> tuple[Array, float]:
        """Weights of mean 1 at the top of the model, and how much higher it is than at the start."""
        w, scores, slope = self.start, self.here, self.slope
        begun = value = self._value(w, scores)
        for _ in range(_INNER):
            step = _minimum(self.h, slope, w) - w
            along = self._scores(step)
            length, reached = self._longest(w, scores, step, along, value)
            if length == 0:
                break
            moved, before = -w, slope
            w = np.maximum(w + length * step, 0)
            w, scores = w / w.mean(), (scores + length * along) / w.mean()
            value, rise = reached, reached - value
            if rise < _LEFT / 10:
                break
            slope, moved = self._slope(w, scores), moved + w
            if rise > _FAR:
                self.h = self._curvature(scores)
            elif (foretold := float(moved @ product(self.h, moved))) > 0:
                # H holds the selection fixed: rows selected anew make up for much of the fall of the slope.
                self.h *= np.clip(moved @ (before - slope) / foretold, 1 / _BEND, _BEND)
        return w, value - begun

    def _longest(
        self, w: Array, scores: Tensor, step: Array, along: Tensor, value: float
    ) -> tuple[float, float]:
        """How far to go along the step, and the value there; selections change on the way, so tops are tried out."""
        found = (0.0, value)

        def tried(length: float) -> bool:
            nonlocal found
            reached = self._value(w + length * step, scores + length * along)
            higher = reached > found[1]
            found = (length, reached) if higher else found
            return higher

        for length in _LENGTHS:
            tried(length)
        if found[0] == 1:
            falling = step < 0
            most = float((w[falling] / -step[falling]).min(initial=np.inf))
            for length in _LONGER:
                if length > most or not tried(length):
                    break
        elif found[0] == 0:
            for length in (0.1, 0.03, 0.01):
                if tried(length):
                    break
        return found

    def _scores(self, w: Array) -> Tensor:
        flat = self.rows.view(-1, self.rows.shape[2]) @ torch.from_numpy(w).float()
        return flat.view(self.rows.shape[:2]).double()

    def _tops(self, scores: Tensor) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Means of the highest on each side, added up, (Q',); and which rows these are."""
        found = [(side, (side * scores[:, c]).topk(self._top, dim=1), c.start) for side, c in self._sides]
        total = torch.stack([t.values.mean(1) for _, t, _ in found]).sum(0)
        return total, [(side, t.indices + start) for side, t, start in found]

    def _parts(self, scores: Tensor) -> tuple[Tensor, Tensor, list[tuple[int, Tensor]]]:
        """top(x) / ‖R x‖, 1 / ‖R x‖, and the selected rows."""
        tops, which = self._tops(scores)
        squares = (self.counts * scores**2).sum(1) * self._size
        inverse = torch.where(squares > 0, squares.rsqrt(), 0.0)
        return tops * inverse, inverse, which

    def _value(self, w: Array, scores: Tensor) -> float:
        """J but for a constant, whatever the scale of w."""
        rho = self._parts(scores)[0]
        added = float(self._delta @ w) / self._size_of(scores)
        return float(rho.mean()) / self.goal.scale + added - self.goal.penalty(w)

    def _size_of(self, scores: Tensor) -> float:
        """1 at the start, and in proportion to the scale of w: the slope that is added has none either."""
        return (
            float((self.counts * scores**2).sum(1) @ self._size / max(1, int((self._size > 0).sum()))) ** 0.5
        )

    def _slope(self, w: Array, scores: Tensor) -> Array:
        rho, inverse, which = self._parts(scores)
        size, live = self._size_of(scores), max(1, int((self._size > 0).sum()))
        share = 1 / (len(rho) * self.goal.scale)
        added = float(self._delta @ w) / (size**3 * live)
        pull = self.counts * scores * (-(rho * inverse**2 * share + added) * self._size)[:, None]
        for side, rows in which:
            pull.scatter_add_(1, rows, (side / self._top * inverse * share)[:, None].expand(-1, self._top))
        flat = self.rows.view(-1, self.rows.shape[2])
        found = (pull.float().view(-1) @ flat).double().numpy() + self._delta / size
        return found + self.goal.pull(w)

    def _curvature(self, scores: Tensor) -> Array:
        """H of `fixed_point` from the rows."""
        rho, inverse, _ = self._parts(scores)
        factors = self.counts * (rho.abs() * inverse**2 * self._size / (len(rho) * self.goal.scale))[:, None]
        flat, factors = self.rows.view(-1, self.rows.shape[2]), factors.float().view(-1, 1)
        groups = flat.shape[1]
        total, half = torch.zeros(groups, groups), groups // 2
        for rows, f in zip(
            flat.split(1024), factors.split(1024)
        ):  # one of the off-diagonal quarters is enough
            scaled = (rows * f).T
            total[:, :half].addmm_(scaled, rows[:, :half])
            total[half:, half:].addmm_(scaled[half:], rows[:, half:])
        h = np.tril(total.double().numpy())
        h += np.tril(h, -1).T
        size = np.diag(h)
        rounding = size < _ROUNDING * size.max(initial=0.0)
        h[rounding], h[:, rounding] = 0.0, 0.0
        h[np.diag_indices(len(h))] += self.goal.weight_decay / len(h)
        return h
