"""Does a model fit its task? A few tokens are changed to see which way it looks.

A loss can be computed of almost any model, and means nothing if the model sees what it is to predict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unde.errors import UndeError
from unde.tasks.tokens import IGNORE, TokenTask, arguments, inner, limits

_SLACK = 64  # units of rounding: experts may see their tokens in another order


def no_encoder_decoder(task: TokenTask, model: nn.Module) -> None:
    if "decoder_input_ids" in arguments(model):
        raise UndeError(
            f"{_name(model)} has an encoder and a decoder: unde.tasks.{type(task).__name__} is for models without. Use "
            "unde.tasks.Seq2SeqLM"
        )


def an_encoder_decoder(task: TokenTask, model: nn.Module) -> None:
    if "decoder_input_ids" not in arguments(model):
        raise UndeError(
            f"{_name(model)} takes no decoder_input_ids, so it is no encoder-decoder: unde.tasks.{type(task).__name__} "
            "is for models such as T5 and BART. Use unde.tasks.CausalLM, with -100 as the labels of the source"
        )


def whole_vocabulary(task: TokenTask, model: nn.Module, logits: Tensor) -> None:
    """A language model gives a number to every token that it knows."""
    vocabulary, classes = limits(model)[0], logits.shape[-1]
    if classes < vocabulary < sys.maxsize:
        raise UndeError(
            f"{_name(model)} knows {vocabulary} tokens but gives {classes} numbers for each: it is no language model, "
            f"as unde.tasks.{type(task).__name__} expects. For classes of tokens use unde.tasks.TokenClassification"
        )


def no_vocabulary(task: TokenTask, model: nn.Module, logits: Tensor) -> None:
    own = getattr(getattr(model, "config", None), "num_labels", None)
    if logits.shape[-1] == limits(model)[0] != own:
        raise UndeError(
            f"{_name(model)} gives a number for each of the {logits.shape[-1]} tokens that it knows: it is a language "
            f"model, and unde.tasks.{type(task).__name__} is for classes of tokens. Use unde.tasks.MaskedLM or CausalLM"
        )


def looks_back(task: TokenTask, model: nn.Module, batch: Any, logits: Tensor, target: Tensor) -> None:
    """Refuses a model that sees the tokens which it is to predict.

    Of the longest example the last token that counts is changed: what is predicted up to it must stay.
    """
    asked = target != IGNORE
    row = int(asked.sum(1).argmax())
    where = asked[row].nonzero()[:, 0]
    last = int(where[-1]) + 1  # it is predicted one place before
    mask = batch.get("attention_mask")
    ahead = int((mask[row].cumsum(0) == 0).sum()) if mask is not None and mask.dim() == 2 else 0
    other = task.predictions(
        model, {**batch, "input_ids": _changed(batch["input_ids"], row, ahead + last)}
    ).logits
    seen = _differ(logits[row, where], other[row, where], _SLACK)
    if seen.any():
        raise UndeError(
            f"{_name(model)} sees the tokens that it is to predict: another token at position {last} changes what it "
            f"predicts for {int(seen.sum())} of {len(where)} tokens up to there. unde.tasks.{type(task).__name__} is "
            "for models that look back alone, such as GPT-2. For a masked language model, such as BERT, use "
            "unde.tasks.MaskedLM"
        )


def looks_ahead(
    task: TokenTask, model: nn.Module, batch: Mapping[str, Any], run: Callable[[Mapping[str, Any]], Tensor]
) -> None:
    """Refuses a model that looks back alone. `batch` has its padding on the right."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    lengths = (
        torch.full_like(ids[:, 0], ids.shape[1]) if mask is None or mask.dim() != 2 else (mask != 0).sum(1)
    )
    row = int(lengths.argmax())
    last = int(lengths[row]) - 1
    if last < 1:
        return
    as_is, end, start = (
        run({**batch, "input_ids": changed})[row]
        for changed in (ids, _changed(ids, row, last), _changed(ids, row, 0))
    )
    ahead = _differ(as_is[:last], end[:last], 4)
    back = _differ(as_is[1 : last + 1], start[1 : last + 1], 4)
    if back.any() and not ahead.any():
        raise UndeError(
            f"{_name(model)} does not see the tokens after the one that it predicts: another token at the end of an "
            f"example changes nothing before it. unde.tasks.{type(task).__name__} is for models that see both sides, "
            "such as BERT. For a model that predicts the next token, such as GPT-2, use unde.tasks.CausalLM"
        )


def _changed(ids: Tensor, row: int, place: int) -> Tensor:
    """With another token there: one of the same text, if it has two."""
    others = ids[row][ids[row] != ids[row, place]]
    made = ids.clone()
    made[row, place] = others[0] if len(others) else (ids[row, place] - 1).abs()
    return made


def _differ(a: Tensor, b: Tensor, slack: float) -> Tensor:
    """(T,), True where logits (T, V) differ by more than rounding does."""
    step = torch.finfo(a.dtype).eps * (slack if a.dtype.itemsize > 2 else slack / 8)
    return (a - b).abs().amax(-1) > step * a.abs().amax()


def _name(model: nn.Module) -> str:
    return type(inner(model)).__name__
