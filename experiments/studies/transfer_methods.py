"""Do weights that were learned for one method help another?

Every method of a bank with the weights of every other, all learned from the same queries. On the diagonal are its own.
"""

from __future__ import annotations

from experiments.shared.sweep import EVERY_BANK, Cell, Weights, objective_of

PAPER = "Table 12"
VARIANTS = EVERY_BANK


def learn(cell: Cell, title: str) -> dict[str, Weights]:
    return {other: objective_of(cell, other) for other in cell.methods}
