"""Do weights that were learned on one data set help on another?

Every method of a bank with weights learned on its own queries, and with those learned on the other banks whose models
have the same layers: the ResNets on MNIST and CIFAR-10, the GPT-2 models on three corpora, LoRA of one UNet on robots
and on emoji, which has no retrained models and lends weights only. The other models have no partner here: the two ViTs
differ in depth, and the UNet of CIFAR-2 has no adapters.
"""

from __future__ import annotations

from experiments.shared import cells
from experiments.shared.banks import MADE_BY
from experiments.shared.sweep import Cell, Weights, objective_of

PAPER = "Table 11"
FAMILIES = (
    ("mnist-resnet", "cifar10-resnet"),
    ("sotu-gpt2", "wikitext-gpt2", "finetuned-gpt2"),
    ("robots", "emoji"),
)
VARIANTS = tuple(bank for family in FAMILIES for bank in family if bank in MADE_BY)
DATA = {  # of the others of their family
    "mnist-resnet": ("cifar10_10k.npz",),
    "sotu-gpt2": ("wikitext-2",),
    "robots": ("emoji_subject_style_background_32.npz",),
}


def learn(cell: Cell, title: str) -> dict[str, Weights]:
    [family] = [family for family in FAMILIES if cell.name in family]
    return {bank: objective_of(cells.get(bank), title) for bank in family}
