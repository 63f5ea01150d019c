"""Other losses to learn weights by: bottom-k, top-k minus bottom-k, no norm, supervised.

"supervised", for diffusion models only, learns from augmented training images, each of which should find itself, as in
the paper. What self-retrieval makes of that idea is in the study of LDS.
"""

from __future__ import annotations

from experiments.shared.sweep import EVERY_BANK, Cell, Weights, objective

PAPER = "Table 10"
VARIANTS = EVERY_BANK
LOSSES = ("top-k", "bottom-k", "top-k-bottom-k", "no-norm")


def learn(cell: Cell, title: str) -> dict[str, Weights]:
    scores = cell.learn_scores(title)
    weights = {loss: objective(scores, loss=loss) for loss in LOSSES}
    if cell.domain == "diffusion":
        from experiments.shared.augmentation import supervised

        weights["supervised"] = supervised(cell, cell.methods[title])
    return weights
