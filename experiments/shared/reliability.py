"""How much of a bank is signal: two seeds of the same subsets, compared.

r is the mean over queries of the Spearman correlation, over subsets, of the utilities of two trainings of the same
subset with different seeds. A perfect predictor of the expected utility would have an LDS of about √r against one seed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.shared.banks import AGAIN, BANKS
from unde.evaluate import Bank


def reliability(name: str) -> dict[str, Any]:
    """{"r", "ceiling", "again": number of subsets trained twice}; None where no second seed was trained."""
    path = BANKS / f"{name}{AGAIN}.npz"
    if not path.exists():
        return {"r": None, "ceiling": None, "again": 0}
    first, second = Bank.open(BANKS / f"{name}.npz"), Bank.open(path)
    count = len(second.masks)
    if not np.array_equal(first.masks[:count], second.masks):
        raise ValueError(f"{path.name} has other subsets than {name}")
    a, b = first.utility["eval"][:count], second.utility["eval"]
    r = float(np.nanmean([spearmanr(a[:, q], b[:, q])[0] for q in range(a.shape[1])]))
    return {"r": r, "ceiling": math.sqrt(max(r, 0.0)), "again": count}
