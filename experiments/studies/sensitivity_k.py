"""How much depends on k, the number of training examples that are taken for true?

LDS of every method of a bank with weights learned from the top 1, 5, 10, 20, 50 or 100 examples of each query, all
other settings at their defaults. The paper chooses k for each task; the default here was chosen once.
"""

from __future__ import annotations

from typing import Any

from experiments.shared.sweep import EVERY_BANK, needed, sweep
from unde import learn_weights

PAPER = "Table 9"
VARIANTS = EVERY_BANK
BANKS = needed(VARIANTS)
KS = (1, 5, 10, 20, 50, 100)


def run(variant: str | None) -> dict[str, Any]:
    assert variant is not None

    def learned(cell, title):
        scores = cell.learn_scores(title)
        return {str(k): learn_weights(scores, k=k) for k in KS}

    return sweep(variant, learned)
