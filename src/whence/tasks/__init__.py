"""Tasks: per-example losses and measurements of a model on a batch."""

from whence.tasks.base import Task
from whence.tasks.classification import Classification
from whence.tasks.diffusion import Diffusion
from whence.tasks.language import CausalLM

__all__ = ["CausalLM", "Classification", "Diffusion", "Task"]
