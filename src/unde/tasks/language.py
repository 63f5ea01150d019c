"""Language models that predict the next token: causal ones, and decoders that read a source text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde.errors import UndeError
from unde.tasks import model_checks
from unde.tasks.perturb import Perturbation
from unde.tasks.replace import Replace, ReplaceBoth, special_tokens
from unde.tasks.tokens import (
    IGNORE,
    Predictions,
    TokenTask,
    check_columns,
    check_examples,
    pad,
    pad_right,
    roll_left,
    run_model,
    same_shape,
    text_config,
    token_logits,
    unwrap_peft,
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
        return pad(examples, packed=True)

    def check(self, model: nn.Module, batch: Any) -> None:
        """Refuse models that see the tokens they are to predict, and those of another loss."""
        model_checks.check_no_decoder(self, model)
        logits, target, _ = self.predictions(model, batch)
        model_checks.check_vocabulary(self, model, logits)
        model_checks.check_causal(self, model, batch, logits, target)

    def predictions(self, model: nn.Module, batch: Any) -> Predictions:
        ids, real, ahead = tokens = check_columns(batch, "CausalLM")
        labels = batch.get("labels")
        if labels is None:
            labels = ids if real is None else ids.masked_fill(~real, IGNORE)
        target = labels.long().masked_fill(torch.arange(ids.shape[1], device=ids.device) <= ahead, IGNORE)
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        why = "every label is -100, or it is a single token, which is predicted from nothing"
        if check_examples(model, inputs, target, tokens, why):
            target = roll_left(target, ahead)
            inputs = {k: roll_left(v, ahead) if same_shape(v, ids) else v for k, v in inputs.items()}
        logits = token_logits(run_model(model, inputs), ids.shape)

        def align(x: Tensor) -> Tensor:  # a token is predicted one place before it
            return roll_left(F.pad(x[:, :-1], (1, 0)), -ahead)

        # Shift the labels, not the logits: no copy of the largest tensor.
        return Predictions(logits, F.pad(target[:, 1:], (0, 1), value=IGNORE), align)


class Seq2SeqLM(TokenTask):
    """Loss of the target text given the source, for T5, BART and their kin.

    Batches are dicts of input_ids (B, S) and labels (B, T), −100 where nothing is predicted, and optionally
    attention_mask; decoder_input_ids, if they are not given, are the labels moved one place to the right as the model
    itself does it. `reduction` is over the tokens of one target, as in `CausalLM`. Padding of the source may be on
    either side.
    """

    def mask(self, batch: Any) -> Any:
        """Of the source and of the target; where both are equally long, what is real in either."""
        ids, labels = batch["input_ids"], batch["labels"]
        real = super().mask(batch)
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        counts = labels != IGNORE
        return [real | counts] if real.shape == counts.shape else [real, counts]

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """Tokens of source and target replaced by others of the training data; special ones and padding stay."""
        return [ReplaceBoth.of(examples, special_tokens(model))]

    def check(self, model: nn.Module, batch: Any) -> None:
        model_checks.check_decoder(self, model)
        model_checks.check_vocabulary(self, model, self.predictions(model, batch).logits)

    def predictions(self, model: nn.Module, batch: Any) -> Predictions:
        ids, real, _ = tokens = check_columns(batch, "Seq2SeqLM", like=("attention_mask",))
        labels = batch.get("labels")
        if labels is None:
            raise UndeError(
                f"a batch of Seq2SeqLM needs 'labels', tokens of the target: this one has {sorted(batch)}"
            )
        if labels.dim() != 2 or len(labels) != len(ids):
            raise UndeError(
                f"labels of shape {tuple(labels.shape)} for input_ids of shape {tuple(ids.shape)}: expected the "
                f"tokens of a target for each source, ({len(ids)}, T)"
            )
        target = labels.long()
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        decoder = {k: inputs.pop(k) for k in list(inputs) if k.startswith("decoder_")}
        left = check_examples(model, inputs, target, tokens, "every label is -100, or the target is empty")
        inputs = pad_right(model, inputs, real, left)
        if "decoder_input_ids" not in decoder:
            decoder["decoder_input_ids"] = _shift_right(model, target)
        logits = token_logits(run_model(model, {**inputs, **decoder}), target.shape)
        return Predictions(logits, target, lambda x: x)


def _shift_right(model: nn.Module, labels: Tensor) -> Tensor:
    """What the decoder sees: the labels one place later, after the token that starts a text."""
    shift = getattr(unwrap_peft(model), "prepare_decoder_input_ids_from_labels", None)
    if callable(shift):
        return shift(labels=labels)
    config = text_config(model)
    start, pad = (getattr(config, f"{n}_token_id", None) for n in ("decoder_start", "pad"))
    if start is None or pad is None:
        raise UndeError(
            f"the config of {type(model).__name__} names no decoder_start_token_id or no pad_token_id: set them, or "
            "give decoder_input_ids"
        )
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)
    return shifted.masked_fill(shifted == IGNORE, pad)
