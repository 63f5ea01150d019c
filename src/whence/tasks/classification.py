"""Cross-entropy classification, for plain modules and Hugging Face models alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from whence.errors import WhenceError
from whence.tasks.base import Task


class Classification(Task):
    """Batches are (inputs, labels), or a dict with "labels" whose other entries are the model's arguments.

    >>> import torch
    >>> Classification().loss(nn.Linear(3, 2), (torch.zeros(5, 3), torch.zeros(5, dtype=torch.long))).shape
    torch.Size([5])
    """

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, _ = self.split(batch)
        output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise WhenceError(
                f"the model returned a {type(logits).__name__}: expected logits, a tensor of shape (B, classes), or an "
                "output with .logits. Override Classification.logits to pick them out"
            )
        return logits

    def split(self, batch: Any) -> tuple[Any, Tensor]:
        if isinstance(batch, Mapping):
            label = next((k for k in ("labels", "label") if k in batch), None)
            if label is None:
                raise WhenceError(f"a classification batch needs 'labels': this one has {sorted(batch)}")
            return {k: v for k, v in batch.items() if k != label}, batch[label]
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        raise WhenceError(
            f"a classification batch is (inputs, labels) or a dict with 'labels', got {type(batch).__name__}"
            + (f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits, labels = self.logits(model, batch), self.split(batch)[1]
        if labels.is_floating_point():
            raise WhenceError(
                f"labels of type {labels.dtype}: expected class numbers. For others, subclass Task"
            )
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            raise WhenceError(
                f"logits of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}: "
                "expected (B, classes) and (B,)"
            )
        return F.cross_entropy(logits, labels.long(), reduction="none")
