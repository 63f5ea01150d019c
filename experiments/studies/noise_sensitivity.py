"""Do weights survive noise in the scores that they are learned from?

Before weights are learned, each score of each group gets Gaussian noise of s times the standard deviation of that
group's scores. LDS is then measured on clean scores.
"""

from __future__ import annotations

from experiments.shared.sweep import EVERY_BANK, Cell, Weights
from unde import learn_weights

PAPER = "Figure 7"
VARIANTS = EVERY_BANK
NOISE = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


def learn(cell: Cell, title: str) -> dict[str, Weights]:
    scores = cell.learn_scores(title)
    return {f"{s:g}": learn_weights(scores, noise=s) for s in NOISE}
