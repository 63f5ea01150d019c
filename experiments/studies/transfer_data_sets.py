"""Do weights that were learned on one data set help on another?

Every method of a bank with weights learned on its own queries, and with those learned on the other banks whose models
have the same layers: the ResNets on MNIST and CIFAR-10, the GPT-2 models on three corpora. The other models have no
partner here: the two ViTs differ in depth, and of the diffusion models one has no adapters.
"""

from __future__ import annotations

from typing import Any

from experiments.shared.sweep import objective, sweep
from unde import Weights

PAPER = "Table 11"
FAMILIES = (("mnist-resnet", "cifar10-resnet"), ("sotu-gpt2", "wikitext-gpt2", "finetuned-gpt2"))
VARIANTS = tuple(bank for family in FAMILIES for bank in family)
DATA = {"mnist-resnet": ("cifar10_10k.npz",), "sotu-gpt2": ("wikitext-2",)}  # of the others of their family


def run(variant: str) -> dict[str, Any]:
    from experiments.shared import cells

    [family] = [family for family in FAMILIES if variant in family]
    learned: dict[tuple[str, str], Weights] = {}

    def weights_of(bank: str, title: str) -> Weights:
        if (bank, title) not in learned:
            learned[bank, title] = objective(cells.get(bank).learn_scores(title))
        return learned[bank, title]

    return sweep(variant, lambda cell, title: {bank: weights_of(bank, title) for bank in family})
