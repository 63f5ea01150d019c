"""Tasks: per-example losses and measurements of a model on a batch."""

from unde.tasks.base import Task
from unde.tasks.classification import Classification, MultiLabel, TokenClassification
from unde.tasks.diffusion import Diffusion
from unde.tasks.language import CausalLM, Seq2SeqLM
from unde.tasks.masked import MaskedLM
from unde.tasks.prediction import Regression

__all__ = [
    "CausalLM",
    "Classification",
    "Diffusion",
    "MaskedLM",
    "MultiLabel",
    "Regression",
    "Seq2SeqLM",
    "Task",
    "TokenClassification",
]
