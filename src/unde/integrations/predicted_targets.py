"""What a model itself says to a text: the target of queries that come without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unde.errors import UndeError
from unde.gradients.model_state import frozen_eval
from unde.tasks import Classification, MultiLabel, Seq2SeqLM, Task, TokenClassification


def said_by(model: nn.Module, task: Task, length: int) -> Callable[[Tensor], Tensor] | None:
    """A function from the tokens of a text to the labels that the model gives it: the likeliest class, that of every
    token, or the text that it writes, of at most `length` tokens. None where the model's own answer has no gradient,
    as for squared errors."""
    if isinstance(task, Seq2SeqLM):
        return lambda tokens: _written(model, tokens, length)
    if isinstance(task, MultiLabel):
        return lambda tokens: (_logits(model, tokens) > 0).float()
    if isinstance(task, (Classification, TokenClassification)):
        return lambda tokens: _logits(model, tokens).argmax(-1)
    return None


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of one text, without the batch."""
    with frozen_eval(model), torch.no_grad():
        return model(input_ids=tokens[None].to(_device(model))).logits[0].cpu()


def _written(model: Any, tokens: Tensor, length: int) -> Tensor:
    with frozen_eval(model), torch.no_grad():
        [found] = model.generate(
            input_ids=tokens[None].to(_device(model)),
            max_new_tokens=length - 1,
            do_sample=False,
            num_beams=1,
            use_cache=True,
        )
    if len(found) < 2:
        raise UndeError("the model writes nothing for such a text: give a target for the query")
    return found[1:].cpu()  # behind the token that starts a text


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
