"""Cross-entropy classification, for plain modules and Hugging Face models alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from unde.errors import UndeError, unknown
from unde.tasks import sampling
from unde.tasks.base import Task
from unde.tasks.perturb import Noise, Perturbation, Replace, special_tokens


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
            raise UndeError(
                f"the model returned a {type(logits).__name__}: expected logits, a tensor of shape (B, classes), or an "
                "output with .logits. Override Classification.logits to pick them out"
            )
        return logits

    def split(self, batch: Any) -> tuple[Any, Tensor]:
        if isinstance(batch, Mapping):
            label = next((k for k in ("labels", "label") if k in batch), None)
            if label is None:
                raise UndeError(f"a classification batch needs 'labels': this one has {sorted(batch)}")
            return {k: v for k, v in batch.items() if k != label}, batch[label]
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        raise UndeError(
            f"a classification batch is (inputs, labels) or a dict with 'labels', got {type(batch).__name__}"
            + (f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        )

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """Noise on floating inputs; tokens replaced where the inputs are texts."""
        if examples and isinstance(examples[0], Mapping) and "input_ids" in examples[0]:
            return [Replace.of(examples, special_tokens(model))]
        return [Noise()]

    def mask(self, batch: Any) -> Tensor | None:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        return mask != 0 if mask is not None and mask.dim() == 2 else None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits, labels = self._predictions(model, batch)
        return F.cross_entropy(logits, labels, reduction="none")

    def measure(
        self, model: nn.Module, batch: Any, *, name: str = "loss", ids: Sequence[int] | None = None
    ) -> Tensor:
        """The "loss", or that of labels drawn from the model's own predictions: "sampled".

        What is drawn depends on the example's id and the predictions alone.
        """
        if name == "loss":
            return self.loss(model, batch)
        if name == "sampled":
            logits, _ = self._predictions(model, batch)
            labels = sampling.draw(logits, sampling.uniforms(ids, 1)[:, 0])
            return F.cross_entropy(logits, labels, reduction="none")
        raise unknown(f"measure of {type(self).__name__}", name, ("loss", "sampled"))

    def _predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        logits, labels = self.logits(model, batch), self.split(batch)[1]
        if not isinstance(labels, Tensor):
            some = next(iter(labels), None) if isinstance(labels, (list, tuple)) else labels
            raise UndeError(
                f"labels such as {some!r}: expected class numbers, from 0 to {logits.shape[-1] - 1}. Number the "
                "classes in the data set"
            )
        if labels.is_floating_point():
            raise UndeError(
                f"labels of type {labels.dtype}: expected class numbers. For others, subclass Task"
            )
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            raise UndeError(
                f"logits of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}: "
                "expected (B, classes) and (B,)"
            )
        return logits, labels.long()
