"""Causal language modelling on padded or packed token batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from whence.errors import WhenceError, unknown
from whence.tasks.base import Task

IGNORE = -100  # a label that carries no loss, as in transformers


class CausalLM(Task):
    """Next-token loss of each sequence: batches are dicts of input_ids, and optionally attention_mask and labels.

    `reduction` is over the tokens of one sequence: "mean" (as Hugging Face trains) or "sum" (its −log p).
    Labels default to the input ids that the attention mask keeps; −100 marks tokens without loss.
    """

    def __init__(self, reduction: str = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise unknown("reduction", reduction, ("mean", "sum"))
        self.reduction = reduction

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            raise WhenceError(
                "a language-modelling batch is a dict with 'input_ids' (and attention_mask, labels)"
            )
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        labels = batch.get("labels")
        if labels is None:
            labels = ids if mask is None else ids.masked_fill(mask == 0, IGNORE)
        output = model(**{k: v for k, v in batch.items() if k != "labels"})
        logits = getattr(output, "logits", output)  # (B, T, V)
        # Shift the labels, not the logits: no copy of the largest tensor.
        target = F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # (B, T)
        per_token = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="none"
        )
        per_token = per_token.view(target.shape)
        if self.reduction == "sum":
            return per_token.sum(1)
        count = (target != IGNORE).sum(1)
        return per_token.sum(1) / count.clamp(min=1)

    def collate(self, examples: list[Any]) -> Any:
        """Pads on the right; the padding is masked and carries no loss."""
        for i, e in enumerate(examples):
            if set(e) != set(examples[0]):
                raise WhenceError(
                    f"example {i} of a batch has {sorted(e)}, the first {sorted(examples[0])}: expected the same"
                )
        columns = {k: [torch.as_tensor(e[k]) for e in examples] for k in examples[0]}
        ragged = len({len(x) for x in columns["input_ids"]}) > 1
        if ragged and "attention_mask" not in columns:
            columns["attention_mask"] = [torch.ones_like(x) for x in columns["input_ids"]]
        fill = {"labels": IGNORE}
        return {
            k: pad_sequence(v, batch_first=True, padding_value=fill.get(k, 0))
            if v[0].dim()
            else torch.stack(v)
            for k, v in columns.items()
        }
