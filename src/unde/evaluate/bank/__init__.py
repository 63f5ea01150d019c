"""Banks of retrained models, the ground truth of LDS."""

from unde.evaluate.bank.bank import Bank
from unde.evaluate.bank.training_spec import TrainingSpec

__all__ = ["Bank", "TrainingSpec"]
