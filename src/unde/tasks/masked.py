"""Masked language modelling: tokens are hidden, and predicted from both sides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unde.errors import UndeError
from unde.tasks import model_checks
from unde.tasks.perturb import Perturbation
from unde.tasks.replace import ReplaceSeen, special_tokens
from unde.tasks.tokens import (
    IGNORE,
    Predictions,
    TokenTask,
    check_columns,
    check_examples,
    pad_right,
    roll_left,
    run_model,
    token_limits,
    token_logits,
)

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
        return [ReplaceSeen.of([with_labels(e) for e in examples], special).after(with_labels)]

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
    known, _ = token_limits(model)
    get = getattr(model, "get_input_embeddings", None)
    table = getattr(get() if callable(get) else None, "weight", None)
    if table is not None:
        known = min(known, table.shape[0])
    if known == token_limits(nn.Identity())[0]:
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
