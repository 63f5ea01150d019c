"""Is it luck? Weights by self-retrieval learned again from other training examples and other noise.

LDS of every method of a bank with weights of three more seeds: each draws the examples that search, learn and judge,
and their copies, anew. Nothing else differs from the study lds, which has the seed 0.
"""

from __future__ import annotations

from typing import Any

from experiments.shared.sweep import EVERY_BANK, sweep

PAPER = ""
VARIANTS = EVERY_BANK
SEEDS = (1, 2, 3)


def run(variant: str) -> dict[str, Any]:
    def learned(cell, title):
        method = cell.methods[title]
        index = cell.index_for(method)
        return {str(seed): index.learn_weights(method=method, seed=seed) for seed in SEEDS}

    return sweep(variant, learned)
