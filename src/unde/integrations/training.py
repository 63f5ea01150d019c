"""Keep checkpoints, learning rates and second moments while a model trains, in the form that `Index.build` takes.

`Recorder` is for a training loop of one's own; `unde.integrations.transformers.CheckpointRecorder` is the callback for
Trainer. `log_audit` logs a ranking of wrong labels to Weights & Biases or TensorBoard.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from unde.errors import UndeError, require_positive
from unde.gradients.adam_preconditioner import moments_by_name
from unde.integrations.trainer import RECORDED, read_entries, recorded
from unde.store.files import PARTIAL, check_plain, write_atomically

SECOND_MOMENTS = "second_moments.safetensors"
_ROWS = 20  # of an audit that are logged as a table


class Recorder:
    """Records a training loop: weights, learning rate and second moments after every `every` steps of the optimizer.

    Nothing in the loop changes: steps are counted by a hook on the optimizer. Leave the block to end the recording.

    Args:
        folder: Where to keep checkpoints; one of an earlier training is refused.
        model: The model in training.
        optimizer: Its optimizer. Second moments are kept of Adam-like ones.
        every: Steps from one checkpoint to the next; None records only when `record` is called.

    Raises:
        UndeError: The folder holds another recording, or parameter groups have different learning rates.

    >>> with Recorder("runs/recorded", model, optimizer, every=100):  # doctest: +SKIP
    ...     train(model, optimizer)
    >>> index = Index.build(model, task, data, "runs/idx", method="tracin",
    ...                     **read_record("runs/recorded").options())  # doctest: +SKIP
    """

    def __init__(
        self, folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, every: int | None = None
    ) -> None:
        require_positive(every=every)
        self.files, self.model, self.optimizer, self.every = RecordFolder(folder), model, optimizer, every
        self.steps = 0
        self.files.start()
        self._hook = optimizer.register_step_post_hook(self._count)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def record(self) -> None:
        """Record the model as it is now."""
        self.files.add(self.steps, self.model, learning_rate(self.optimizer), self.optimizer)

    def _count(self, *_: object) -> None:
        self.steps += 1
        if self.every is not None and self.steps % self.every == 0:
            self.record()


@dataclass(frozen=True)
class TrainingRecord:
    """What a recorder kept; `read_record` returns it.

    Attributes:
        checkpoints: Files of weights, in the order of their steps.
        checkpoint_weights: The learning rate of the step that led to each.
        second_moments: {parameter: v} of the last checkpoint; None for other optimizers than Adam's kin.
    """

    checkpoints: list[Path]
    checkpoint_weights: list[float]
    second_moments: Mapping[str, Tensor] | None

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `Index.build`: checkpoints, checkpoint_weights, second_moments."""
        options = {"checkpoints": self.checkpoints, "checkpoint_weights": self.checkpoint_weights}
        return options if self.second_moments is None else options | {"second_moments": self.second_moments}


def read_record(folder: str | os.PathLike[str]) -> TrainingRecord:
    """Read what a `Recorder` or a `CheckpointRecorder` kept.

    Raises:
        UndeError: The folder holds no recorded checkpoint.

    >>> read_record("runs/recorded").checkpoint_weights  # doctest: +SKIP
    [0.001, 0.0005]
    """
    checkpoints, rates = recorded(folder)
    path = Path(folder).expanduser() / SECOND_MOMENTS
    moments = None
    if path.exists():
        check_plain(path, follow=True)
        moments = load_file(path)
    return TrainingRecord(checkpoints, rates, moments)


def learning_rate(optimizer: Optimizer) -> float:
    """The learning rate of all parameter groups.

    Raises:
        UndeError: They have different ones.
    """
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise UndeError(
            f"the optimizer's parameter groups have different learning rates {sorted(rates)}: TracInCP weights "
            "a checkpoint by one rate"
        )
    [rate] = rates
    return rate


class RecordFolder:
    """The files of a recording."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()

    def start(self, step: int = 0) -> None:
        """Begin, or go on after `step`: later checkpoints are dropped, as their steps come a second time."""
        before = read_entries(self.folder)
        if before and step == 0:
            raise UndeError(
                f"{self.folder} holds {len(before)} checkpoints of an earlier training: choose another folder, or "
                "delete it. To go on with that training, resume_from_checkpoint"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write([e for e in before if e["step"] <= step])

    def add(self, step: int, model: nn.Module, rate: float, optimizer: Optimizer | None = None) -> None:
        file = f"step-{step:08d}.safetensors"
        save_state(self.folder / file, model.state_dict())
        moments = {} if optimizer is None else moments_by_name(optimizer, model)
        if moments:
            save_state(self.folder / SECOND_MOMENTS, {name: v.float() for name, (v, _) in moments.items()})
        others = [e for e in read_entries(self.folder) if e["step"] != step]
        self._write([*others, {"step": step, "learning_rate": rate, "file": file}])

    def _write(self, entries: list[dict[str, Any]]) -> None:
        entries = sorted(entries, key=lambda e: e["step"])
        write_atomically(self.folder / RECORDED, (json.dumps(entries, indent=1) + "\n").encode())


def save_state(path: Path, state: Mapping[str, Tensor]) -> None:
    """Each tensor once: of tied ones the first name is kept."""
    tensors: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in state.items():
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


def log_audit(labels: Any, to: Any, step: int | None = None, name: str = "unde") -> dict[str, float]:
    """Log the result of `index.audit_labels()` while a model trains.

    Args:
        labels: The DataFrame of `index.audit_labels()`.
        to: A run of Weights & Biases (`wandb.init()`), or a SummaryWriter of TensorBoard.
        step: The step of the training.
        name: Prefix of the logged names.

    Returns:
        What was logged: the number and share of suspected labels, and the mean label quality.

    Raises:
        UndeError: `to` is neither, or `labels` lacks a column.

    >>> log_audit(index.audit_labels(), SummaryWriter(), step=100)  # doctest: +SKIP
    """
    columns = list(getattr(labels, "columns", ()))
    for column in ("is_label_issue", "label_quality"):
        if column not in columns:
            raise UndeError(
                f"labels has no column {column!r}: expected the DataFrame of index.audit_labels()"
            )
    values = {
        "label_issues": float(labels["is_label_issue"].sum()),
        "label_issue_share": float(labels["is_label_issue"].mean()),
        "mean_label_quality": float(labels["label_quality"].mean()),
    }
    values = {f"{name}/{key}": value for key, value in values.items() if math.isfinite(value)}
    suspects = labels[labels["is_label_issue"]].sort_values("label_quality").head(_ROWS)
    if hasattr(to, "add_scalar"):  # TensorBoard
        for key, value in values.items():
            to.add_scalar(key, value, step)
        to.add_text(f"{name}/suspects", _markdown(suspects), step)
    elif hasattr(to, "log"):  # Weights & Biases
        try:
            wandb = importlib.import_module("wandb")
            table = {f"{name}/suspects": wandb.Table(dataframe=suspects.reset_index().astype(str))}
        except ImportError:  # another logger with the same method
            table = {}
        to.log(values | table, step=step)
    else:
        raise UndeError(
            f"cannot log to a {type(to).__name__}: expected a run of wandb, or a SummaryWriter of TensorBoard"
        )
    return values


def _markdown(rows: Any) -> str:
    """A DataFrame as a table of Markdown."""
    cells = [["", *map(str, rows.columns)], ["---"] * (len(rows.columns) + 1)]
    cells += [[str(i), *map(str, row)] for i, row in zip(rows.index, rows.itertuples(index=False))]
    return "\n".join(f"| {' | '.join(c.replace('|', '/') for c in row)} |" for row in cells)
