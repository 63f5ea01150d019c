"""Do weights that were learned on one data set help on another?

Every method of a bank with weights learned on its own queries, and with those learned on the other banks whose models
have the same layers: the ResNets on MNIST and CIFAR-10, the GPT-2 models on three corpora. The other models have no
partner here: the two ViTs differ in depth, and of the diffusion models one has no adapters.
"""

from __future__ import annotations

from experiments.shared import cells
from experiments.shared.sweep import Cell, Weights, objective_of

PAPER = "Table 11"
FAMILIES = (("mnist-resnet", "cifar10-resnet"), ("sotu-gpt2", "wikitext-gpt2", "finetuned-gpt2"))
VARIANTS = tuple(bank for family in FAMILIES for bank in family)
DATA = {"mnist-resnet": ("cifar10_10k.npz",), "sotu-gpt2": ("wikitext-2",)}  # of the others of their family


def learn(cell: Cell, title: str) -> dict[str, Weights]:
    [family] = [family for family in FAMILIES if cell.name in family]
    return {bank: objective_of(cells.get(bank), title) for bank in family}
