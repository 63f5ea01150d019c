"""How much of a bank is signal: some of its subsets were trained twice, with different seeds.

r is the mean over queries of the Spearman correlation, over subsets, of how well the two models of a subset do. A
perfect predictor of the expected utility would have an LDS of about √r against one seed. The interval of r is over
subsets, by the jackknife: a bootstrap would draw some subsets twice, and ties change a correlation of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.shared.banks import AGAIN
from experiments.shared.paths import BANKS as FOLDER
from experiments.shared.sweep import EVERY_BANK
from unde.errors import UndeError
from unde.evaluate import Bank

PAPER = ""
VARIANTS = EVERY_BANK
BANKS = {name: (name, name + AGAIN) for name in VARIANTS}


def run(variant: str) -> dict[str, Any]:
    first, second = (Bank.open(FOLDER / f"{name}.npz") for name in BANKS[variant])
    count = len(second.masks)
    if not np.array_equal(first.masks[:count], second.masks):
        raise UndeError(f"the bank {variant}{AGAIN} has other subsets than {variant}: make it anew")
    twice = first.utility["eval"][:count], second.utility["eval"]
    r = agreement(*twice)
    without = [agreement(*(np.delete(u, s, axis=0) for u in twice)) for s in range(count)]
    right = first.utility.get("right")
    return {
        "models": len(first.masks),
        "twice": count,
        "r": r,
        "ci95": 1.96 * math.sqrt((count - 1) * np.var(without)),
        "ceiling": math.sqrt(max(r, 0.0)),
        "accuracy": None if right is None else float(right.mean()),
    }


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Of utilities (S, Q) of two seeds: the mean over queries of their rank correlation over subsets."""
    return float(np.nanmean([spearmanr(x, y)[0] for x, y in zip(a.T, b.T, strict=True)]))
