"""Hugging Face transformers: models and texts as a Setup, and checkpoints recorded by Trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from unde.errors import UndeError, require_positive
from unde.integrations.language import hf_setup
from unde.integrations.preferences import add_reference, read_pairs
from unde.integrations.spans import span_queries
from unde.integrations.trainer import RECORDED, read_entries, recorded
from unde.store.files import PARTIAL, write_atomically

try:
    from transformers import TrainerCallback
except ImportError:
    raise UndeError("this needs transformers: pip install 'unde[hf]'") from None

__all__ = ["CheckpointRecorder", "add_reference", "hf_setup", "read_pairs", "recorded", "span_queries"]


class CheckpointRecorder(TrainerCallback):
    """Keeps the weights, and the learning rate of the step that led to them, at every save or every `every` steps.

    >>> recorder = CheckpointRecorder("runs/recorded", every=100)  # doctest: +SKIP
    >>> Trainer(model, arguments, train_dataset=data, callbacks=[recorder]).train()  # doctest: +SKIP
    >>> checkpoints, weights = recorded("runs/recorded")  # doctest: +SKIP
    >>> Index.build(model, CausalLM(), data, "runs/idx", method="tracin",
    ...             checkpoints=checkpoints, checkpoint_weights=weights)  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str], every: int | None = None) -> None:
        require_positive(every=every)
        self.folder, self.every = Path(folder).expanduser(), every
        self._rate = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every is None and getattr(args.save_strategy, "value", args.save_strategy) == "no":
            raise UndeError(
                "nothing would be recorded, as the training saves nothing: give CheckpointRecorder(…, every=100), "
                "or another save_strategy to TrainingArguments"
            )
        if not state.is_world_process_zero:
            return
        before = read_entries(self.folder)
        if before and state.global_step == 0:
            raise UndeError(
                f"{self.folder} holds {len(before)} checkpoints of an earlier training: choose another folder, or "
                "delete it. To go on with that training, resume_from_checkpoint"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        # A training that goes on passes the steps after its checkpoint a second time.
        self._write([e for e in before if e["step"] <= state.global_step])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Read here: when the step ends, the schedule has moved on to the next rate.
        rates = {float(group["lr"]) for group in kwargs["optimizer"].param_groups}
        if len(rates) > 1:
            raise UndeError(
                f"the optimizer's parameter groups have different learning rates {sorted(rates)}: TracInCP weights "
                "a checkpoint by one rate"
            )
        [self._rate] = rates

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every is not None and state.global_step % self.every == 0:
            self._record(state, kwargs["model"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every is None:
            self._record(state, kwargs["model"])

    def _record(self, state: Any, model: nn.Module) -> None:
        if not state.is_world_process_zero:
            return
        step = int(state.global_step)
        file = f"step-{step:08d}.safetensors"
        _save(self.folder / file, model)
        others = [e for e in read_entries(self.folder) if e["step"] != step]
        self._write([*others, {"step": step, "learning_rate": self._rate, "file": file}])

    def _write(self, entries: list[dict[str, Any]]) -> None:
        entries = sorted(entries, key=lambda e: e["step"])
        write_atomically(self.folder / RECORDED, (json.dumps(entries, indent=1) + "\n").encode())


def _save(path: Path, model: nn.Module) -> None:
    """All weights and buffers, each tensor once: of tied ones the first name is kept."""
    tensors: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        tensor = tensor.detach().cpu().contiguous()
        tensors[name] = tensor if alone else tensor.clone()  # the file takes no two views of one memory
    temporary = path.with_name(path.name + PARTIAL)
    save_file(tensors, temporary)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
