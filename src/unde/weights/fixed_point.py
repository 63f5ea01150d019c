"""The fixed-point solver: an iteration on M×M matrices that needs few passes over the data.

With the selected training examples of each query held fixed, the objective is a mean of ratios,

    F(w) = mean_q ρ_q,   ρ_q = a_q·w / n_q,   n_q = √(wᵀ G_q w),   G_q = C_qᵀ C_q,

with a_q the mean contributions of the selected rows. It does not depend on the scale of w. We maximise,
over w ≥ 0 of mean 1,

    J(w) = F(w) / F₁ − λ′/2 · V(w),   V(w) = ‖w − 1‖² / M,

with F₁ the mean size of the unweighted objective and V the squared coefficient of variation of the weights.
Neither term has a unit, so λ′ means the same in every problem: weights with a coefficient of variation of 1
must raise the objective by λ′/2 of its unweighted value to be worth it. λ′ = 0 is the paper's objective,
and w becomes uniform, which is the unweighted method, as λ′ grows.

For any scale of w, V = M‖w‖²/(Σw)² − 1. With c = ‖w‖²/M, the gradient of J at a w of mean 1 is b − H w,

    H = mean_q ρ_q G_q / (n_q² F₁) + λ′/M · I,      b = mean_q a_q / (n_q F₁) + λ′c/M · 1.

So a stationary point with w ≥ 0 is the minimiser over w ≥ 0 of ½ wᵀHw − b·w with its own H and b, a
non-negative least-squares problem. The iteration solves that problem with the H and b of the present w.

It rises. A query with ρ_q < 0 enters H with |ρ_q|, and b makes up for it so that b − H w stays the
gradient. H is then positive semi-definite, the quadratic model is convex with slope −∇J at w, and the step
to its minimiser is a direction of ascent; a line search takes as much of it as raises J. Selecting anew
cannot lower F either, since the k largest scores are those with the largest mean. There are finitely many
selections, so this ends, at a point that satisfies the first-order conditions of the true objective; the
code also stops when a new selection has raised J by less than a millionth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from unde.devices import double_device, put
from unde.weights.contributions import Contributions
from unde.weights.objective import Fit, WeightProblem, select, zero_contributions_error

_PASSES = 50  # selections at most; about ten are usual
_STEPS = 200  # steps with one selection at most; ten or twenty are usual
_RISE = 1e-6  # a selection that raises J by less than this is the last
_SLOPE = 1e-9  # where the gradient of J counts as zero, in units in which H has a unit diagonal
_PROXIMAL = 1e-9  # pull to the present w, for what H leaves undetermined: equal groups, dead groups
_LENGTH = 1e-3  # accuracy of the length of a step
_TURNS = 20  # guesses of which weights are zero; a few are usual


def fixed_point(problem: WeightProblem, weight_decay: float) -> Fit:
    """Weights by turns of selection and the fixed-point iteration, until nothing changes."""
    return fixed_points([problem], [weight_decay])[0]


def fixed_points(problems: Sequence[WeightProblem], weight_decays: Sequence[float]) -> list[Fit]:
    """Solve several problems with the same queries, which share the matrices G_q."""
    grams = Grams.of(problems[0].data, problems[0].queries)
    return [_solve(problem, decay, grams) for problem, decay in zip(problems, weight_decays)]


def _solve(problem: WeightProblem, weight_decay: float, grams: Grams) -> Fit:
    w = torch.ones(problem.data.groups, dtype=torch.float64)
    chosen, mean = select(problem, w)
    rho, _ = _ratios(mean, w, grams.apply(w))
    if not rho.any():
        raise zero_contributions_error()
    unweighted = float(rho.mean())
    goal = RatioObjective(grams, scale=float(rho.abs().mean()), weight_decay=weight_decay)
    curve: list[float] = []
    best = -math.inf
    for _ in range(_PASSES):
        w, value, converged = goal.ascend(mean, w)
        curve.append((value + goal.penalty(w)) * goal.scale)
        before = chosen
        chosen, mean = select(problem, w)
        if torch.equal(chosen, before) or value - best < _RISE:
            return Fit(w, unweighted, curve, converged)
        best = value
    return Fit(w, unweighted, curve, converged=False)


class Grams:
    """The matrices G_q of all queries in order, (q, M, M) in float64 for some at a time.

    `compute` makes them; they are kept, or made again on every use.
    """

    def __init__(self, compute: Callable[[], Iterable[Tensor]], keep: bool = True) -> None:
        self._compute, self._keep = compute, keep
        self._kept: list[Tensor] | None = None

    @classmethod
    def of(cls, data: Contributions, queries: Tensor) -> Grams:
        """C_qᵀ C_q of contributions, kept if they fit in half the budget."""
        keep = 8 * data.groups**2 * len(queries) <= data.memory // 2
        return cls(partial(_multiply_groups, data, queries), keep)

    def __iter__(self) -> Iterator[Tensor]:
        if self._keep and self._kept is None:
            self._kept = list(self._compute())
        return iter(self._compute() if self._kept is None else self._kept)

    def apply(self, vector: Tensor) -> Tensor:
        """G_q v for each query: (Q', M)."""
        return torch.cat([(g.flatten(0, 1) @ vector.to(g)).view(len(g), -1).cpu() for g in self])

    def combine(self, factors: Tensor) -> Tensor:
        """Σ_q f_q G_q: (M, M)."""
        total, start = torch.zeros((), dtype=torch.float64), 0
        for g in self:
            total = total.to(g) + (factors[start : start + len(g)].to(g) @ g.flatten(1)).view_as(g[0])
            start += len(g)
        return total.cpu()


def _multiply_groups(data: Contributions, queries: Tensor) -> Iterator[Tensor]:
    """C_qᵀ C_q of some queries at a time, in float64: squares lose half the digits."""
    groups, device = data.groups, double_device(data.device)
    for span, blocks in data.sweep("products of groups", queries, 8 * groups**2):
        gram = torch.zeros(len(span.wanted), groups, groups, dtype=torch.float64, device=device)
        for _, block in blocks:
            for place, row in enumerate(span.wanted.tolist()):
                c = put(block[row], data.device, torch.float64)
                gram[place] += c.T @ c
        yield gram


@dataclass(frozen=True)
class RatioObjective:
    """J for a fixed selection, and how to climb it."""

    grams: Grams
    scale: float  # F₁
    weight_decay: float

    def penalty(self, w: Tensor) -> float:
        return self.weight_decay / 2 * (float(w @ w) / len(w) - 1)  # mean(w) is 1

    def ascend(self, a: Tensor, w: Tensor) -> tuple[Tensor, float, bool]:
        """The maximum of J from `w`, its value, and whether the first-order conditions hold there."""
        gw = self.grams.apply(w)  # (Q', M)
        for _ in range(_STEPS):
            h, b = self._model(a, w, gw)
            unit = units(h)
            slope = b - h @ w
            # How far a unit step up the slope moves w ≥ 0: zero just where the first-order conditions hold.
            if ((w * unit + slope / unit).clamp(min=0) - w * unit).abs().max() <= _SLOPE:
                return w, self._value(a, w, gw), True
            target = nonnegative_minimum(h, b, w, unit, _PROXIMAL)
            step = target / target.mean() - w
            w, gw = self._line_search(a, w, gw, step, float(slope @ step))
        return w, self._value(a, w, gw), False

    def _value(self, a: Tensor, w: Tensor, gw: Tensor) -> float:
        return float(_ratios(a, w, gw)[0].mean()) / self.scale - self.penalty(w)

    def _model(self, a: Tensor, w: Tensor, gw: Tensor) -> tuple[Tensor, Tensor]:
        """H (M, M) and b (M,) of the quadratic model at w."""
        groups, per_query = len(w), 1 / (self.scale * len(a))
        rho, inverse = _ratios(a, w, gw)
        h = self.grams.combine(rho.abs() * inverse**2 * per_query)
        h.diagonal().add_(self.weight_decay / groups)
        b = (inverse * per_query) @ a + self.weight_decay / groups * float(w @ w) / groups
        b += ((rho.abs() - rho) * inverse**2 * per_query) @ gw
        return h, b

    def _line_search(
        self, a: Tensor, w: Tensor, gw: Tensor, step: Tensor, rise: float
    ) -> tuple[Tensor, Tensor]:
        """The top of J on the way from w to w + step, with its G_q w.

        The products with G_q are linear along the way, so the search costs O(Q') for each length tried.
        """
        gstep = self.grams.apply(step)
        start, pull = self._value(a, w, gw), self.weight_decay / len(w)
        signal, signal_slope = a @ w, a @ step  # (Q',) each, and of wᵀ G_q w half the slope and curvature
        square, half_slope, half_curvature = gw @ w, gw @ step, gstep @ step

        def slope(length: float) -> float:
            bend = half_slope + length * half_curvature
            inverse = _inverse_root(square + length * (half_slope + bend))
            along = (signal_slope - (signal + length * signal_slope) * bend * inverse**2) * inverse
            return float(along.mean()) / self.scale - pull * float((w + length * step) @ step)

        length = 1.0
        if slope(1.0) < 0 < slope(0.0):
            low, high = 0.0, 1.0
            while high - low > _LENGTH:
                length = (low + high) / 2
                low, high = (length, high) if slope(length) > 0 else (low, length)
        # A top need not be the highest one: J must have risen (Armijo), but for rounding.
        while self._value(a, w + length * step, gw + length * gstep) < start + 1e-4 * length * rise - 1e-14:
            length /= 2
        return (w + length * step).clamp(min=0), gw + length * gstep


def _ratios(a: Tensor, w: Tensor, gw: Tensor) -> tuple[Tensor, Tensor]:
    """ρ_q and 1/n_q of each query, both 0 for a query whose scores are all zero."""
    inverse = _inverse_root(gw @ w)
    return (a @ w) * inverse, inverse


def _inverse_root(squares: Tensor) -> Tensor:
    return torch.where(squares > 0, squares, math.inf).rsqrt()


def units(h: Tensor) -> Tensor:
    """Groups' contributions differ by orders of magnitude; in w·unit, H has a unit diagonal."""
    diagonal = h.diagonal().sqrt()
    return torch.where(diagonal > 0, diagonal, 1.0)  # groups without contributions


def nonnegative_minimum(h: Tensor, b: Tensor, w: Tensor, unit: Tensor, proximal: float) -> Tensor:
    """argmin over x ≥ 0 of ½ xᵀHx − b·x, with a faint pull to w.

    Which weights are zero is guessed from w and mended until the first-order conditions hold; where guesses go round in
    circles, the active-set method of scipy finds it, slowly.
    """
    scaled = h / unit[:, None] / unit
    scaled.diagonal().add_(proximal)
    right = b / unit + proximal * w * unit
    close = 1e-12 * float(right.abs().max())
    free = (w > 0) | (b > h @ w)
    for _ in range(_TURNS):
        x = torch.zeros_like(w)
        if free.any():
            factor = torch.linalg.cholesky(scaled[free][:, free])
            x[free] = torch.cholesky_solve(right[free, None], factor)[:, 0]
        wrong = torch.where(free, x < 0, right - scaled @ x > close)
        if not wrong.any():
            return x / unit
        free ^= wrong
    from scipy.optimize import nnls  # slow to import

    root = torch.linalg.cholesky(scaled)
    target = torch.linalg.solve_triangular(root, right[:, None], upper=False)[:, 0]
    return torch.from_numpy(nnls(root.T.numpy(), target.numpy())[0]) / unit


def fit_to_retrained(predictions: np.ndarray, utility: np.ndarray, weight_decay: float) -> np.ndarray:
    """Fit one weight for each group, (M,) of mean 1, to predictions (S, Q, M) and utilities (S, Q), or their ranks.

    With P_q (S, M) what each group predicts for the S models and u_q their utilities, both centred over the models,

        F(w) = mean_q ⟨u_q, P_q w⟩ / (‖u_q‖ ‖P_q w‖)

    is a mean of ratios as the objective above is, with a_q = P_qᵀ u_q / ‖u_q‖ and G_q = P_qᵀ P_q, and the same
    iteration climbs it, with the same pull towards uniform weights.
    """
    x, u = (torch.from_numpy(v).double() for v in (predictions, utility))
    x, u = (x - x.mean(0)).transpose(0, 1), (u - u.mean(0)).T  # (Q, S, M), (Q, S)
    u = u / u.norm(dim=1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
    norms = x.sum(2).norm(dim=1)  # of the unweighted predictions of each query
    x = x / torch.where(norms > 0, norms, 1.0)[:, None, None]
    signal = torch.einsum("qsm,qs->qm", x, u)
    ones, unweighted = torch.ones(x.shape[2], dtype=torch.float64), signal.sum(1).abs()
    if not unweighted.any():
        return ones.numpy()
    grams = Grams(lambda: [x.transpose(1, 2) @ x])
    objective = RatioObjective(grams, scale=float(unweighted.mean()), weight_decay=weight_decay)
    return objective.ascend(signal, ones)[0].numpy()
