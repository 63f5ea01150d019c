"""Weights fitted to retrained models: those whose predictions correlate best with what the models did.

With P_q (S, M) what each group predicts for the S models and u_q their utilities, both centred over the models,

    F(w) = mean_q ⟨u_q, P_q w⟩ / (‖u_q‖ ‖P_q w‖)

is a mean of ratios as the objective of `fixed_point` is, with a_q = P_qᵀ u_q / ‖u_q‖ and G_q = P_qᵀ P_q, and the same
iteration climbs it, with the same pull towards uniform weights.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unde.weights.fixed_point import RatioObjective

Array = NDArray[np.float64]


def fit_to_retrained(predictions: Array, utility: Array, weight_decay: float) -> Array:
    """Fit one weight for each group, (M,) of mean 1, to predictions (S, Q, M) and utilities (S, Q), or their ranks."""
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
