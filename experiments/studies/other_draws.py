"""Is it luck? Weights by self-retrieval learned again from other training examples and other noise.

LDS of every method of a bank with weights of three more seeds: each draws the examples that search, learn and judge,
and their copies, anew. Nothing else differs from the study lds, which has the seed 0.
"""

from __future__ import annotations

from experiments.shared.sweep import EVERY_BANK, Cell, Weights

PAPER = ""
VARIANTS = EVERY_BANK
SEEDS = (1, 2, 3)


def learn(cell: Cell, title: str) -> dict[str, Weights]:
    method = cell.methods[title]
    index = cell.index_for(method)
    return {str(seed): index.learn_weights(method=method, seed=seed) for seed in SEEDS}
