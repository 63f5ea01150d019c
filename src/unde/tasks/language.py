"""Language models: causal, encoder-decoder, and masked ones."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde.errors import UndeError
from unde.tasks import model_checks
from unde.tasks.perturb import Perturbation
from unde.tasks.replace import Replace, special_tokens
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
    token_limits,
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
        return [Replace.of(examples, special_tokens(model), "target")]

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


# Of the tokens to predict: shown as the mask, or as a random token; the rest as they are.
HIDDEN, RANDOM = 0.8, 0.1
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


class MaskedLM(TokenTask):
    """Loss of the hidden tokens of each sequence, for BERT and its kin; batches as in `CausalLM`.

    With labels (−100 at all tokens that are not predicted), input_ids are taken as they are, masked already, as
    transformers' collator for language models makes them. Without, tokens are hidden here: each with
    `probability`, at least one in each sequence, 80 % of them as the mask token, 10 % as a random one and 10 % as they
    are. Which ones depends on `seed` and the tokens of the sequence alone, so that an example is always hidden in the
    same way, whatever its batch. That takes the tokenizer, or its mask token and special tokens by number:

    >>> task = MaskedLM(mask_token_id=4, special_tokens=[0, 1, 2], seed=1)
    >>> hidden = task.hide_tokens({"input_ids": torch.tensor([[1, 9, 8, 7, 2]])}, vocabulary=10)
    >>> hidden["labels"].shape, (hidden["labels"] != -100).any().item()
    (torch.Size([1, 5]), True)

    `reduction` is over the tokens of one sequence, as in `CausalLM`.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        mask_token_id: int | None = None,
        special_tokens: Collection[int] = (),
        probability: float = 0.15,
        seed: int = 0,
        reduction: str = "mean",
    ) -> None:
        super().__init__(reduction)
        if not 0 < probability < 1:
            raise UndeError(
                f"probability is {probability}: expected more than 0 and less than 1, such as 0.15"
            )
        if tokenizer is not None and mask_token_id is None:
            mask_token_id = getattr(tokenizer, "mask_token_id", None)
            if mask_token_id is None:
                raise UndeError(
                    f"the tokenizer ({type(tokenizer).__name__}) has no mask token: it is not that of a masked "
                    "language model. For a model that predicts the next token use unde.tasks.CausalLM"
                )
        self.mask_token_id = mask_token_id
        known = getattr(tokenizer, "all_special_ids", ())
        self.special_tokens = sorted({int(t) for t in (*special_tokens, *known)})
        self.probability, self.seed = probability, seed

    def hide_tokens(self, batch: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
        """The batch with some tokens hidden, and what they were as its labels."""
        if self.mask_token_id is None:
            raise UndeError(
                "a batch without labels, and no mask token to hide tokens with: write MaskedLM(tokenizer), or "
                "give labels as transformers' DataCollatorForLanguageModeling makes them"
            )
        if self.mask_token_id >= vocabulary:
            raise UndeError(
                f"the mask token is {self.mask_token_id}, but the model knows {vocabulary} tokens: a tokenizer that "
                "does not fit the model"
            )
        ids, mask, _ = check_columns(batch, "MaskedLM")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        special = torch.tensor([*self.special_tokens, self.mask_token_id], device=ids.device)
        free = real & ~(ids.unsqueeze(-1) == special).any(-1)
        if "special_tokens_mask" in batch:
            free = free & (batch["special_tokens_mask"] == 0)
        place = real.long().cumsum(1)  # counted from the first real token
        each = _mix(ids.long() * _signed(_ODD[1]) + place * _signed(_ODD[0]))
        key = _mix((each * real).sum(1, keepdim=True) + self.seed)
        chance, kind, token = (_mix(_mix(key + n) + place * _signed(_ODD[0])) for n in (1, 2, 3))
        u = _uniform(chance).masked_fill(~free, 2.0)
        chosen = free & ((u < self.probability) | (u == u.amin(1, keepdim=True)))
        how = _uniform(kind)
        inputs = ids.masked_fill(chosen & (how < HIDDEN), self.mask_token_id)
        other = ((token & 0x7FFFFFFFFFFFFFFF) % vocabulary).to(ids.dtype)
        inputs = torch.where(chosen & (how >= HIDDEN) & (how < HIDDEN + RANDOM), other, inputs)
        return {**batch, "input_ids": inputs, "labels": ids.masked_fill(~chosen, IGNORE)}

    def perturbations(self, model: nn.Module, examples: Sequence[Any]) -> list[Perturbation]:
        """Tokens that are seen replaced by others of the training data: hidden, special ones and padding stay."""

        def with_labels(example: Any) -> Any:
            if "labels" in example:
                return example
            batch = self._hide_if_unlabelled(model, self.collate([example]))
            return {**example, **{k: batch[k][0] for k in ("input_ids", "labels")}}

        special = {*self.special_tokens, *special_tokens(model)}
        return [Replace.of(examples, special, "hidden", with_labels)]

    def check(self, model: nn.Module, batch: Any) -> None:
        """Refuse models that do not see both sides of a token, and those of another loss."""
        model_checks.check_no_decoder(self, model)
        inputs, _, _ = self._prepare(model, batch)
        model_checks.check_vocabulary(self, model, self._logits(model, inputs))
        model_checks.check_bidirectional(self, model, inputs, lambda tokens: self._logits(model, tokens))

    def predictions(self, model: nn.Module, batch: Any) -> Predictions:
        inputs, target, ahead = self._prepare(model, batch)
        return Predictions(self._logits(model, inputs), target, lambda x: roll_left(x, -ahead))

    def _prepare(self, model: nn.Module, batch: Any) -> tuple[dict[str, Any], Tensor, Tensor]:
        """What the model gets, the tokens that it is to find, and the padding that was in front."""
        _, real, ahead = tokens = check_columns(batch, "MaskedLM")
        labelled = self._hide_if_unlabelled(model, batch)
        target = labelled["labels"].long()
        inputs = {k: v for k, v in labelled.items() if k not in ("labels", "special_tokens_mask")}
        why = "no label says what a hidden token is (all are -100)"
        why = why if "labels" in batch else "all its tokens are special ones, which are not hidden"
        left = check_examples(model, inputs, target, tokens, why)
        return pad_right(model, inputs, real, left), roll_left(target, ahead), ahead

    def _hide_if_unlabelled(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return dict(batch) if "labels" in batch else self.hide_tokens(batch, _vocabulary(model))

    def _logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        return token_logits(run_model(model, inputs), inputs["input_ids"].shape)


def _vocabulary(model: nn.Module) -> int:
    get = getattr(model, "get_input_embeddings", lambda: None)
    table = getattr(get(), "weight", None)
    known = min(token_limits(model)[0], sys.maxsize if table is None else table.shape[0])
    if known == sys.maxsize:
        raise UndeError(
            f"{type(model).__name__} does not say how many tokens it knows (config.vocab_size): set it, or give "
            "labels, as transformers' collator for language models makes them"
        )
    return known


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; integer tensors wrap around, on every device and under torch.func."""
    x = (x ^ _shift_bits(x, 30)) * _signed(_ODD[1])
    x = (x ^ _shift_bits(x, 27)) * _signed(_ODD[2])
    return x ^ _shift_bits(x, 31)


def _shift_bits(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _uniform(x: Tensor) -> Tensor:
    """In [0, 1), from the upper bits."""
    return _shift_bits(x, 40).float() * 2.0**-24
