"""Do weights that were learned for one method help another?

Every method of a bank with the weights of every other, all learned from the same queries. On the diagonal are its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from experiments.shared.sweep import EVERY_BANK, objective, sweep
from unde import Weights

PAPER = "Table 12"
VARIANTS = EVERY_BANK


def run(variant: str) -> dict[str, Any]:

    @cache
    def weights_of(cell, title: str) -> Weights:
        return objective(cell.learn_scores(title))

    return sweep(variant, lambda cell, title: {other: weights_of(cell, other) for other in cell.methods})
