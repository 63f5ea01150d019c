"""Tasks: per-example losses and measurements of a model on a batch."""

from unde.tasks.base import Task
from unde.tasks.classification import Classification
from unde.tasks.diffusion import Diffusion
from unde.tasks.language import CausalLM

__all__ = ["CausalLM", "Classification", "Diffusion", "Task"]
