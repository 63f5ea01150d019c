"""Causal language modelling on padded or packed token batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde.tasks import model_checks as fitting
from unde.tasks.perturb import Perturbation
from unde.tasks.replace import Replace, special_tokens
from unde.tasks.tokens import (
    IGNORE,
    Predictions,
    TokenTask,
    check,
    columns,
    like,
    padded,
    padding_ahead,
    rolled,
    run,
    token_logits,
)


class CausalLM(TokenTask):
    """Next-token loss of each sequence: batches are dicts of input_ids, and optionally attention_mask and labels.

    Labels default to the input ids that the attention mask keeps; −100 marks tokens without loss, such as a
    prompt. The first token of a sequence is predicted from nothing and never counts, padded or not.

    `reduction` is over the tokens of one sequence. "mean": every sequence weighs the same, as in training
    with one sequence in each step. "sum" (its −log p): every token weighs the same, as in the mean over all
    tokens of a step that transformers' Trainer takes; the gradients differ by one factor for each step.

    Padding may be on either side; what is on the left is moved to the right before the model sees it, so that
    positions are counted from the first real token. All entries of a batch but labels go to the model.

    Packed rows (several documents in one, position_ids restarting at 0): a row is one example, and its loss
    is what transformers trains on. Documents see each other unless the batch has no attention_mask
    (transformers then reads the borders off position_ids) or a 4-d one that keeps them apart; the first token
    of a later document counts unless its label is −100. Under a 4-d mask, padding counts unless labels say no.
    """

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """Tokens replaced by others of the training data; special ones, padding and prompts stay."""
        return [Replace.of(examples, special_tokens(model))]

    def collate(self, examples: list[Any]) -> Any:
        """Pads on the right; the padding is masked and carries no loss.

        Packed rows (with position_ids) get no mask that they did not bring, but labels: with a mask
        transformers would overlook the borders of documents, and nothing looks at padding on its right.
        """
        return padded(examples, packed=True)

    def check(self, model: nn.Module, batch: Any) -> None:
        """Refuses models that see the tokens they are to predict, and those whose loss is another."""
        fitting.no_encoder_decoder(self, model)
        logits, target, _ = self.predictions(model, batch)
        fitting.whole_vocabulary(self, model, logits)
        fitting.looks_back(self, model, batch, logits, target)

    def predictions(self, model: nn.Module, batch: Any) -> Predictions:
        ids, real = columns(batch, "CausalLM")
        labels = batch.get("labels")
        if labels is None:
            labels = ids if real is None else ids.masked_fill(~real, IGNORE)
        ahead = torch.zeros_like(ids[:, :1]) if real is None else padding_ahead(real)
        target = labels.long().masked_fill(torch.arange(ids.shape[1], device=ids.device) <= ahead, IGNORE)
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        why = "every label is -100, or it is a single token, which is predicted from nothing"
        if check(model, inputs, target, real, ahead, why):
            target = rolled(target, ahead)
            inputs = {k: rolled(v, ahead) if like(v, ids) else v for k, v in inputs.items()}
        logits = token_logits(run(model, inputs), ids.shape)

        def placed(x: Tensor) -> Tensor:  # a token is predicted one place before it
            return rolled(F.pad(x[:, :-1], (1, 0)), -ahead)

        # Shift the labels, not the logits: no copy of the largest tensor.
        return Predictions(logits, F.pad(target[:, 1:], (0, 1), value=IGNORE), placed)
