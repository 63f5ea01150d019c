"""Which kind of language model a Hugging Face model is: how it is loaded, and which task it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unde.errors import UndeError
from unde.gradients.model_state import frozen_eval
from unde.tasks import (
    CausalLM,
    Classification,
    MaskedLM,
    MultiLabel,
    Regression,
    Seq2SeqLM,
    Task,
    TokenClassification,
)
from unde.tasks.tokens import unwrap_peft


@dataclass(frozen=True)
class Kind:
    """`auto` is the end of the names of transformers' and PEFT's classes that load it, `table` that of the list of such
    models in transformers, `adapter` what PEFT calls it in the config of an adapter."""

    auto: str
    table: str
    adapter: str
    label: str


CAUSAL = Kind("CausalLM", "CAUSAL_LM", "CAUSAL_LM", "causal language model")
MASKED = Kind("MaskedLM", "MASKED_LM", "", "masked language model")
SEQ2SEQ = Kind("Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQ_2_SEQ_LM", "sequence-to-sequence model")
SEQUENCE = Kind("SequenceClassification", "SEQUENCE_CLASSIFICATION", "SEQ_CLS", "classifier of texts")
TOKEN = Kind("TokenClassification", "TOKEN_CLASSIFICATION", "TOKEN_CLS", "classifier of tokens")
KINDS = (SEQUENCE, TOKEN, SEQ2SEQ, CAUSAL, MASKED)


def kind_of(config: Any) -> Kind:
    """By the class that a config names as the one that was saved; without, by what its family is."""
    tables = {kind: _table(kind) for kind in KINDS}
    family = getattr(config, "model_type", "")
    names = getattr(config, "architectures", None) or ()
    remote = getattr(config, "auto_map", None) or {}
    for kind in KINDS:
        if names and names[0] in tables[kind].get(family, ()) and not _both(config, kind):
            return kind
    for kind in KINDS:
        if f"AutoModelFor{kind.auto}" in remote or any(n.endswith(f"For{kind.auto}") for n in names[:1]):
            return kind
    if getattr(config, "is_encoder_decoder", False):
        return SEQ2SEQ
    both_ways = family in tables[MASKED] and not getattr(config, "is_decoder", False)
    return MASKED if both_ways and not names else CAUSAL


def _both(config: Any, kind: Kind) -> bool:
    """BART and its kin are listed as masked models too, under the class that translates."""
    return kind is MASKED and bool(getattr(config, "is_encoder_decoder", False))


def _table(kind: Kind) -> Mapping[str, tuple[str, ...]]:
    from transformers.models.auto import modeling_auto

    table = getattr(modeling_auto, f"MODEL_FOR_{kind.table}_MAPPING_NAMES", {})
    return {family: (names,) if isinstance(names, str) else tuple(names) for family, names in table.items()}


def kind_of_adapter(task_type: str | None, base: Any) -> Kind:
    """By what PEFT was told, or else by its base model."""
    return next((k for k in KINDS if task_type and k.adapter == task_type), None) or kind_of(base)


def kind_of_model(model: nn.Module) -> Kind:
    """Of a model that is loaded: by the name of its class, or else by its config."""
    name = type(unwrap_peft(model)).__name__
    known = next((k for k in KINDS if name.endswith(f"For{k.auto}")), None)
    if known is not None or getattr(model, "config", None) is None or isinstance(model.config, Mapping):
        return known or CAUSAL
    try:
        families = {k: _table(k).get(getattr(model.config, "model_type", ""), ()) for k in KINDS}
    except ImportError:
        return CAUSAL
    return next((k for k in KINDS if name in families[k] and not _both(model.config, k)), CAUSAL)


def task_for(kind: Kind, model: nn.Module, tokenizer: Any) -> Task:
    """The task that such a model was trained on."""
    if kind is MASKED:
        return MaskedLM(tokenizer)  # without one, for batches that bring labels
    if kind is SEQUENCE:
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        tasks = {"regression": Regression, "multi_label_classification": MultiLabel}
        return tasks.get(problem, Classification)()
    return {CAUSAL: CausalLM, SEQ2SEQ: Seq2SeqLM, TOKEN: TokenClassification}[kind]()


def predictor(model: nn.Module, task: Task, length: int) -> Callable[[Tensor], Tensor] | None:
    """A function from the tokens of a text to the model's labels: a class, classes of tokens, or a text of at most
    `length` tokens. None for squared errors, where the model's answer has no gradient."""
    if isinstance(task, Seq2SeqLM):
        return lambda tokens: _generate(model, tokens, length)
    if isinstance(task, MultiLabel):
        return lambda tokens: (_logits(model, tokens) > 0).float()
    if isinstance(task, (Classification, TokenClassification)):
        return lambda tokens: _logits(model, tokens).argmax(-1)
    return None


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of one text, without the batch."""
    device = next(model.parameters()).device
    with frozen_eval(model), torch.no_grad():
        return model(input_ids=tokens[None].to(device)).logits[0].cpu()


def _generate(model: Any, tokens: Tensor, length: int) -> Tensor:
    ids, greedy = tokens[None].to(next(model.parameters()).device), {"do_sample": False, "num_beams": 1}
    with frozen_eval(model), torch.no_grad():
        [tokens] = model.generate(input_ids=ids, max_new_tokens=length - 1, use_cache=True, **greedy)
    if len(tokens) < 2:
        raise UndeError("the model writes nothing for such a text: give a target for the query")
    return tokens[1:].cpu()  # after the token that starts a text
