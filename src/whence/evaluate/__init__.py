"""How good is an attribution? Metrics on plain arrays, and the bank of retrained models that LDS needs."""

from whence.evaluate.bank import Bank
from whence.evaluate.compare import Comparison, compare
from whence.evaluate.estimate import Estimate, paired
from whence.evaluate.lds import lds
from whence.evaluate.mislabel import mislabel_auc, mislabel_auc_interval
from whence.evaluate.recall import recall_at_k

__all__ = [
    "Bank",
    "Comparison",
    "Estimate",
    "compare",
    "lds",
    "mislabel_auc",
    "mislabel_auc_interval",
    "paired",
    "recall_at_k",
]
