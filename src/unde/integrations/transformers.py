"""Hugging Face transformers: models and texts as a Setup, and checkpoints recorded by Trainer."""

from unde.integrations.language import hf_setup
from unde.integrations.recorder import CheckpointRecorder, recorded

__all__ = ["CheckpointRecorder", "hf_setup", "recorded"]
