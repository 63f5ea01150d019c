"""Tasks: per-example losses and measurements of a model on a batch."""

from unde.tasks.base import Task
from unde.tasks.diffusion import Diffusion
from unde.tasks.language import CausalLM, MaskedLM, Seq2SeqLM
from unde.tasks.prediction import Classification, MultiLabel, Regression, TokenClassification
from unde.tasks.preference import Preference, Reward

__all__ = [
    "CausalLM",
    "Classification",
    "Diffusion",
    "MaskedLM",
    "MultiLabel",
    "Preference",
    "Regression",
    "Reward",
    "Seq2SeqLM",
    "Task",
    "TokenClassification",
]
