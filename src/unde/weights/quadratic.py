"""Minima of quadratic forms over w ≥ 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import nnls

Array = NDArray[np.float64]

_TURNS = 20  # guesses of which weights are zero; a few are usual


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
    free = (w > 0) | (b > h @ w)
    for _ in range(_TURNS):
        x, inside = np.zeros(len(w)), np.flatnonzero(free)
        if len(inside):
            x[inside] = cho_solve(cho_factor(scaled[np.ix_(inside, inside)], lower=True), right[inside])
        wrong = np.where(free, x < 0, right - scaled @ x > close)
        if not wrong.any():
            return x / unit
        free ^= wrong
    factor = cholesky(scaled, lower=True)
    return nnls(factor.T, solve_triangular(factor, right, lower=True))[0] / unit
