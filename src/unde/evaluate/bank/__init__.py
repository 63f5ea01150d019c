"""The bank of retrained models that LDS is measured with."""

from unde.evaluate.bank.bank import Bank
from unde.evaluate.bank.training_spec import Training

__all__ = ["Bank", "Training"]
