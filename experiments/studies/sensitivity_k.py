"""How much depends on k, the number of training examples that are taken for true?

LDS of every method of a bank with weights learned by the paper's objective from the top 1, 3, 5, 10, 20, 50 or 100
examples of each query, at one fixed decay. The paper chooses k and the decay for each task.
"""

from __future__ import annotations

from experiments.shared.sweep import EVERY_BANK, Cell, Weights, objective

PAPER = "Table 9"
VARIANTS = EVERY_BANK
KS = (1, 3, 5, 10, 20, 50, 100)


def learn(cell: Cell, title: str) -> dict[str, Weights]:
    scores = cell.learn_scores(title)
    return {str(k): objective(scores, k=k) for k in KS}
