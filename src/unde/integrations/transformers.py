"""Hugging Face transformers: models and texts as a Setup, and checkpoints recorded by Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from unde.errors import UndeError, require_positive
from unde.integrations.language import hf_setup
from unde.integrations.preferences import add_reference, read_pairs
from unde.integrations.spans import span_queries
from unde.integrations.trainer import recorded
from unde.integrations.training import RecordFolder, learning_rate, read_record

try:
    from transformers import TrainerCallback
except ImportError:
    raise UndeError("this needs transformers: pip install 'unde[hf]'") from None

__all__ = [
    "CheckpointRecorder",
    "add_reference",
    "hf_setup",
    "read_pairs",
    "read_record",
    "recorded",
    "span_queries",
]


class CheckpointRecorder(TrainerCallback):
    """Keeps weights, the learning rate of the step that led to them, and Adam's second moments.

    It does so at every save, or every `every` steps.

    >>> recorder = CheckpointRecorder("runs/recorded", every=100)  # doctest: +SKIP
    >>> Trainer(model, arguments, train_dataset=data, callbacks=[recorder]).train()  # doctest: +SKIP
    >>> Index.build(model, CausalLM(), data, "runs/idx", method="tracin",
    ...             **read_record("runs/recorded").options())  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str], every: int | None = None) -> None:
        require_positive(every=every)
        self.files, self.every = RecordFolder(folder), every
        self._rate = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every is None and getattr(args.save_strategy, "value", args.save_strategy) == "no":
            raise UndeError(
                "nothing would be recorded, as the training saves nothing: give CheckpointRecorder(…, every=100), "
                "or another save_strategy to TrainingArguments"
            )
        if state.is_world_process_zero:
            self.files.start(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Read here: when the step ends, the schedule has moved on to the next rate.
        self._rate = learning_rate(kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every is not None and state.global_step % self.every == 0:
            self._record(state, kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every is None:
            self._record(state, kwargs)

    def _record(self, state: Any, parts: Mapping[str, Any]) -> None:
        if state.is_world_process_zero:
            self.files.add(int(state.global_step), parts["model"], self._rate, parts.get("optimizer"))
