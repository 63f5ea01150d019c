"""Minima of quadratic forms over w ≥ 0.

Products and factors are torch's. NumPy and SciPy bring a library with threads of its own, which go on waiting for work,
busily, a tenth of a second after they had some: the cores that the next pass over contributions needs.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

_TURNS = 20  # guesses of which weights are zero; a few are usual


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
