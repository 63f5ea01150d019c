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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unde.devices import double_device, put
from unde.weights.contributions import Contributions
from unde.weights.objective import Fit, WeightProblem, select, zero_contributions_error

Array = NDArray[np.float64]

_PASSES = 50  # selections at most; about ten are usual
_STEPS = 200  # steps with one selection at most; ten or twenty are usual
_RISE = 1e-6  # a selection that raises J by less than this is the last
_SLOPE = 1e-9  # where the gradient of J counts as zero, in units in which H has a unit diagonal
_PROXIMAL = 1e-9  # pull to the present w, for what H leaves undetermined: equal groups, dead groups


def fixed_point(problem: WeightProblem, weight_decay: float) -> Fit:
    """Weights by turns of selection and the fixed-point iteration, until nothing changes."""
    return fixed_points([problem], [weight_decay])[0]


def fixed_points(problems: Sequence[WeightProblem], weight_decays: Sequence[float]) -> list[Fit]:
    """Solve several problems with the same queries, which share the matrices G_q."""
    grams = Grams(problems[0].data, problems[0].queries)
    return [_solve(problem, decay, grams) for problem, decay in zip(problems, weight_decays)]


def _solve(problem: WeightProblem, weight_decay: float, grams: Grams) -> Fit:
    w = np.ones(problem.data.groups)
    chosen, mean = select(problem, torch.from_numpy(w))
    rho, _ = _ratios(mean.numpy(), w, grams.apply(w))
    if not rho.any():
        raise zero_contributions_error()
    unweighted = float(rho.mean())
    goal = RatioObjective(grams, scale=float(np.abs(rho).mean()), weight_decay=weight_decay)
    curve: list[float] = []
    best = -math.inf
    for _ in range(_PASSES):
        w, value, converged = goal.ascend(mean.numpy(), w)
        curve.append((value + goal.penalty(w)) * goal.scale)
        before = chosen
        chosen, mean = select(problem, torch.from_numpy(w))
        if torch.equal(chosen, before) or value - best < _RISE:
            return Fit(torch.from_numpy(w), unweighted, curve, converged)
        best = value
    return Fit(torch.from_numpy(w), unweighted, curve, converged=False)


class Grams:
    """G_q = C_qᵀ C_q of every query: cached if they fit in half the budget, else recomputed on every use."""

    def __init__(self, data: Contributions, queries: Tensor) -> None:
        self._data, self._queries = data, queries
        self._bytes = 8 * data.groups**2  # for each query, in float64
        self._fits = len(queries) * self._bytes <= data.memory // 2
        self._cache: list[tuple[slice, Tensor]] | None = None

    def apply(self, vector: Array) -> Array:
        """G_q v for each query: (Q', M)."""
        v = put(torch.from_numpy(vector), self._data.device)
        products = [(gram.flatten(0, 1) @ v).view(len(gram), -1) for _, gram in self._all()]
        return torch.cat(products).cpu().numpy()

    def combine(self, factors: Array) -> Array:
        """Σ_q f_q G_q: (M, M)."""
        total = self._zeros()
        for places, gram in self._all():
            total += (torch.from_numpy(factors[places]).to(total) @ gram.flatten(1)).view_as(total)
        return total.cpu().numpy()

    def _zeros(self, *count: int) -> Tensor:
        """(…, M, M) in float64, where that is computed with the contributions."""
        shape = *count, self._data.groups, self._data.groups
        return torch.zeros(shape, dtype=torch.float64, device=double_device(self._data.device))

    def _all(self) -> Iterable[tuple[slice, Tensor]]:
        if self._fits and self._cache is None:
            self._cache = list(self._compute())
        return self._compute() if self._cache is None else self._cache

    def _compute(self) -> Iterator[tuple[slice, Tensor]]:
        """Places of queries with their (q, M, M) matrices, in float64: squares lose half the digits."""
        for span, blocks in self._data.sweep("products of groups", self._queries, self._bytes):
            gram = self._zeros(len(span.wanted))
            for _, block in blocks:
                for place, row in enumerate(span.wanted.tolist()):
                    c = put(block[row], self._data.device, torch.float64)
                    gram[place] += c.T @ c
            yield span.places, gram


class GramMatrices(Protocol):
    """The matrices G_q of all queries: G_q v of each, (Q', M), and Σ_q f_q G_q, (M, M)."""

    def apply(self, vector: Array) -> Array: ...
    def combine(self, factors: Array) -> Array: ...


@dataclass(frozen=True)
class RatioObjective:
    """J for a fixed selection, and how to climb it."""

    grams: GramMatrices
    scale: float  # F₁
    weight_decay: float

    def penalty(self, w: Array) -> float:
        return self.weight_decay / 2 * (float(w @ w) / len(w) - 1)  # mean(w) is 1

    def ascend(self, a: Array, w: Array) -> tuple[Array, float, bool]:
        """The maximum of J from `w`, its value, and whether the first-order conditions hold there."""
        gw = self.grams.apply(w)  # (Q', M)
        for _ in range(_STEPS):
            h, b = self._model(a, w, gw)
            unit = units(h)
            slope = b - h @ w
            # How far a unit step up the slope moves w ≥ 0: zero just where the first-order conditions hold.
            if np.abs(np.maximum(w * unit + slope / unit, 0) - w * unit).max() <= _SLOPE:
                return w, self._value(a, w, gw), True
            target = nonnegative_minimum(h, b, w, unit, _PROXIMAL)
            step = target / target.mean() - w
            w, gw = self._line_search(a, w, gw, step, float(slope @ step))
        return w, self._value(a, w, gw), False

    def _value(self, a: Array, w: Array, gw: Array) -> float:
        return float(_ratios(a, w, gw)[0].mean()) / self.scale - self.penalty(w)

    def _model(self, a: Array, w: Array, gw: Array) -> tuple[Array, Array]:
        """H (M, M) and b (M,) of the quadratic model at w."""
        groups, per_query = len(w), 1 / (self.scale * len(a))
        rho, inverse = _ratios(a, w, gw)
        h = self.grams.combine(np.abs(rho) * inverse**2 * per_query)
        h[np.diag_indices(groups)] += self.weight_decay / groups
        b = (inverse * per_query) @ a + self.weight_decay / groups * float(w @ w) / groups
        b += ((np.abs(rho) - rho) * inverse**2 * per_query) @ gw
        return h, b

    def _line_search(self, a: Array, w: Array, gw: Array, step: Array, rise: float) -> tuple[Array, Array]:
        """The top of J on the way from w to w + step, with its G_q w.

        The products with G_q are linear along the way, so the search costs O(Q') for each length tried.
        """
        gstep = self.grams.apply(step)
        start = self._value(a, w, gw)

        def slope(length: float) -> float:
            x, gx = w + length * step, gw + length * gstep
            rho, inverse = _ratios(a, x, gx)
            along = (a @ step) * inverse - rho * inverse**2 * (gx @ step)  # (Q',)
            return float(along.mean()) / self.scale - self.weight_decay / len(w) * float(x @ step)

        from scipy.optimize import brentq  # slow to import

        length = 1.0 if slope(1.0) >= 0 or slope(0.0) <= 0 else float(brentq(slope, 0.0, 1.0, xtol=1e-6))
        # A top need not be the highest one: J must have risen (Armijo), but for rounding.
        while self._value(a, w + length * step, gw + length * gstep) < start + 1e-4 * length * rise - 1e-14:
            length /= 2
        return np.maximum(w + length * step, 0), gw + length * gstep


def _ratios(a: Array, w: Array, gw: Array) -> tuple[Array, Array]:
    """ρ_q and 1/n_q of each query, both 0 for a query whose scores are all zero."""
    squares = gw @ w  # (Q',)
    inverse = 1 / np.sqrt(np.where(squares > 0, squares, np.inf))
    return (a @ w) * inverse, inverse


Array = NDArray[np.float64]

_TURNS = 20  # guesses of which weights are zero; a few are usual


# --- minima of quadratic forms over w ≥ 0 --------------------------------------------------------------------
# Products and factors are torch's. NumPy and SciPy bring a library with threads of its own, which go on waiting for
# work, busily, a tenth of a second after they had some: the cores that the next pass over contributions needs.


def product(h: Array, x: Array) -> Array:
    """h x, of a matrix and a vector."""
    return torch.mv(torch.from_numpy(h), torch.from_numpy(x)).numpy()


def units(h: Array) -> Array:
    """Groups' contributions differ by orders of magnitude; in w·unit, H has a unit diagonal."""
    found = np.sqrt(np.diag(h))
    return np.where(found > 0, found, 1.0)  # groups without contributions


def nonnegative_minimum(h: Array, b: Array, w: Array, unit: Array, proximal: float) -> Array:
    """argmin over x ≥ 0 of ½ xᵀHx − b·x, with a faint pull to w.

    Which weights are zero is guessed from w and mended until the first-order conditions hold; where guesses go round in
    circles, the active-set method of scipy finds it, slowly.
    """
    scaled = h / unit[:, None] / unit
    scaled[np.diag_indices(len(w))] += proximal
    right = b / unit + proximal * w * unit
    close = 1e-12 * float(np.abs(right).max(initial=0.0))
    free = (w > 0) | (b > product(h, w))
    for _ in range(_TURNS):
        x, inside = np.zeros(len(w)), np.flatnonzero(free)
        if len(inside):
            factor = torch.linalg.cholesky(torch.from_numpy(scaled[np.ix_(inside, inside)]))
            x[inside] = torch.cholesky_solve(torch.from_numpy(right[inside, None]), factor)[:, 0].numpy()
        wrong = np.where(free, x < 0, right - product(scaled, x) > close)
        if not wrong.any():
            return x / unit
        free ^= wrong
    from scipy.linalg import cholesky, solve_triangular  # slow to import
    from scipy.optimize import nnls

    root = cholesky(scaled, lower=True)
    return nnls(root.T, solve_triangular(root, right, lower=True))[0] / unit


Array = NDArray[np.float64]


def fit_to_retrained(predictions: Array, utility: Array, weight_decay: float) -> Array:
    """Fit one weight for each group, (M,) of mean 1, to predictions (S, Q, M) and utilities (S, Q), or their ranks.

    With P_q (S, M) what each group predicts for the S models and u_q their utilities, both centred over the models,

        F(w) = mean_q ⟨u_q, P_q w⟩ / (‖u_q‖ ‖P_q w‖)

    is a mean of ratios as the objective above is, with a_q = P_qᵀ u_q / ‖u_q‖ and G_q = P_qᵀ P_q, and the same
    iteration climbs it, with the same pull towards uniform weights.
    """
    x = predictions - predictions.mean(0)
    u = utility - utility.mean(0)
    u = u / np.maximum(np.linalg.norm(u, axis=0), np.finfo(np.float64).tiny)
    x = x.transpose(1, 0, 2)  # (Q, S, M)
    ones = np.ones(x.shape[2])
    norms = np.linalg.norm(x @ ones, axis=1)  # of the unweighted predictions of each query
    x = x / np.where(norms > 0, norms, 1.0)[:, None, None]
    signal = np.einsum("qsm,sq->qm", x, u)
    unweighted = np.abs(signal @ ones).mean() if len(signal) else 0.0
    if not unweighted > 0:
        return ones
    objective = RatioObjective(_MomentMatrices(x), scale=float(unweighted), weight_decay=weight_decay)
    return objective.ascend(signal, ones)[0]


class _MomentMatrices:
    """G_q = P_qᵀ P_q, in memory."""

    def __init__(self, x: Array) -> None:
        self.grams = np.matmul(x.transpose(0, 2, 1), x)  # (Q, M, M)

    def apply(self, vector: Array) -> Array:
        return self.grams @ vector

    def combine(self, factors: Array) -> Array:
        return np.tensordot(factors, self.grams, 1)
