"""Does a model fit its task? A loss means nothing if the model sees what it is to predict.

A few tokens are changed to see which way the model looks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unde.errors import UndeError
from unde.tasks.tokens import (
    IGNORE,
    TokenTask,
    arguments,
    left_padding,
    real_tokens,
    token_limits,
    unwrap_peft,
)

_SLACK = 64  # units of rounding: experts may see their tokens in another order


def check_no_decoder(task: TokenTask, model: nn.Module) -> None:
    if "decoder_input_ids" in arguments(model):
        raise UndeError(
            f"{_name(model)} has an encoder and a decoder: {_for(task)} models without. Use Seq2SeqLM"
        )


def check_decoder(task: TokenTask, model: nn.Module) -> None:
    if "decoder_input_ids" not in arguments(model):
        raise UndeError(
            f"{_name(model)} takes no decoder_input_ids, so it is no encoder-decoder: {_for(task)} models such as T5. "
            "Use unde.tasks.CausalLM, with -100 as the labels of the source"
        )


def check_vocabulary(task: TokenTask, model: nn.Module, logits: Tensor) -> None:
    """A language model gives a number to every token that it knows."""
    vocabulary, classes = token_limits(model)[0], logits.shape[-1]
    if classes < vocabulary < sys.maxsize:
        raise UndeError(
            f"{_name(model)} knows {vocabulary} tokens but gives {classes} numbers for each: it is no language model, "
            f"as unde.tasks.{type(task).__name__} expects. For classes of tokens use unde.tasks.TokenClassification"
        )


def check_classes(task: TokenTask, model: nn.Module, logits: Tensor) -> None:
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    if logits.shape[-1] == token_limits(model)[0] != labels:
        raise UndeError(
            f"{_name(model)} gives a number for each of the {logits.shape[-1]} tokens that it knows: it is a language "
            f"model, and {_for(task)} classes of tokens. Use unde.tasks.MaskedLM or CausalLM"
        )


def check_causal(task: TokenTask, model: nn.Module, batch: Any, logits: Tensor, target: Tensor) -> None:
    """Refuse a model that sees the tokens which it is to predict.

    Change the last token of the longest example that has a loss: predictions up to it must stay.
    """
    counts = target != IGNORE
    row = int(counts.sum(1).argmax())
    where = counts[row].nonzero()[:, 0]
    last = int(where[-1]) + 1  # it is predicted one place before
    real = real_tokens(batch)
    ahead = 0 if real is None else int(left_padding(real)[row])
    other = task.predictions(model, {**batch, "input_ids": _replace(batch["input_ids"], row, ahead + last)})
    differ = _differ(logits[row, where], other.logits[row, where], _SLACK)
    if differ.any():
        raise UndeError(
            f"{_name(model)} sees the tokens that it is to predict: another token at position {last} changes what it "
            f"predicts for {int(differ.sum())} of {len(where)} tokens up to there. {_for(task)} models that look back "
            "alone, such as GPT-2. For a masked language model, such as BERT, use unde.tasks.MaskedLM"
        )


def check_bidirectional(
    task: TokenTask, model: nn.Module, batch: Mapping[str, Any], run: Callable[[Mapping[str, Any]], Tensor]
) -> None:
    """Refuse a model that looks back alone. `batch` has its padding on the right."""
    ids, real = batch["input_ids"], real_tokens(batch)
    lengths = torch.full_like(ids[:, 0], ids.shape[1]) if real is None else real.sum(1)
    row = int(lengths.argmax())
    last = int(lengths[row]) - 1
    if last < 1:
        return
    plain, end, start = (
        run({**batch, "input_ids": tokens})[row]
        for tokens in (ids, _replace(ids, row, last), _replace(ids, row, 0))
    )
    ahead = _differ(plain[:last], end[:last], 4)
    back = _differ(plain[1 : last + 1], start[1 : last + 1], 4)
    if back.any() and not ahead.any():
        raise UndeError(
            f"{_name(model)} does not see the tokens after the one that it predicts: another token at the end of an "
            f"example changes nothing before it. {_for(task)} models that see both sides, such as BERT. For a model "
            "that predicts the next token, such as GPT-2, use unde.tasks.CausalLM"
        )


def _replace(ids: Tensor, row: int, place: int) -> Tensor:
    """Put another token there: one of the same text, if it has two."""
    others = ids[row][ids[row] != ids[row, place]]
    ids = ids.clone()
    ids[row, place] = others[0] if len(others) else (ids[row, place] - 1).abs()
    return ids


def _differ(a: Tensor, b: Tensor, slack: float) -> Tensor:
    """(T,), True where logits (T, V) differ by more than rounding does."""
    step = torch.finfo(a.dtype).eps * (slack if a.dtype.itemsize > 2 else slack / 8)
    return (a - b).abs().amax(-1) > step * a.abs().amax()


def _name(model: nn.Module) -> str:
    return type(unwrap_peft(model)).__name__


def _for(task: TokenTask) -> str:
    return f"unde.tasks.{type(task).__name__} is for"
