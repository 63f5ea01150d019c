"""Pairs of a chosen and a rejected answer, from files as TRL reads them, and their reference log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from unde import console
from unde.data import to_device
from unde.errors import UndeError
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import placement
from unde.integrations.documents import (
    Record,
    Texts,
    check_length,
    check_tokens,
    columns_of,
    field_of,
    pieces,
    read_records,
    source_name,
)
from unde.integrations.examples import common_prefix, completion
from unde.integrations.labelled import LabelledExamples
from unde.tasks import CausalLM
from unde.tasks.preference import CHOSEN, REFERENCE, REJECTED, join_answer

LENGTH = 1024  # tokens, as in TRL
_SIDES = (CHOSEN, REJECTED)
_TOKENS = ("prompt_ids", "chosen_ids", "rejected_ids")


def holds_pairs(source: Texts) -> bool:
    """Whether records have a chosen and a rejected answer, as texts, messages or tokens."""
    columns = set(columns_of(source))
    return columns.issuperset(_SIDES) or columns.issuperset(_TOKENS[1:])


def read_pairs(
    source: Texts, tokenizer: Any, length: int = LENGTH, whole: bool = False, rows: int | None = None
) -> LabelledExamples:
    """Pairs as TRL's DPOTrainer and RewardTrainer tokenize them.

    Args:
        source: A file, a folder of `datasets` or a list of records: `chosen` and `rejected`, texts or messages, with
            their `prompt` or beginning with it; or the columns `prompt_ids`, `chosen_ids` and `rejected_ids` of a
            trainer's `train_dataset`. Columns `ref_chosen_logps`, `ref_rejected_logps` and `margin` are kept.
        tokenizer: The tokenizer of the model.
        length: Tokens of a prompt with an answer; longer ones are cut off at the end, as in training.
        whole: Whether to join prompt and answer, for reward models.
        rows: How many tokens the model knows; by default as many as the tokenizer.

    Returns:
        Dicts of tokens, with `.ids` that are the field "id" of their records, or else their lines.

    Raises:
        UndeError: If a record holds no pair.

    >>> pairs = read_pairs("preferences.jsonl", tokenizer)  # doctest: +SKIP
    """
    check_length(length)
    examples, ids, long, dropped = [], list[str](), 0, 0
    columns = [*_SIDES, "prompt", "tools", *_TOKENS, *REFERENCE, "margin"]
    known = columns_of(source)
    columns = sorted(columns, key=lambda name: name not in known)  # of tables the first one has to be there
    for record in read_records(source, columns):
        prompt, chosen, rejected = _tokenized(record, tokenizer)
        check_tokens(record.where, [*prompt, *chosen, *rejected], rows or len(tokenizer))
        if len(prompt) >= length and not whole:
            dropped += 1
            continue
        long += len(prompt) + max(len(chosen), len(rejected)) > length
        answers = {
            "chosen_ids": chosen[: length - len(prompt)],
            "rejected_ids": rejected[: length - len(prompt)],
        }
        if whole:
            examples.append({k: [*prompt, *v][:length] for k, v in answers.items()})
        else:
            examples.append({"prompt_ids": prompt, **answers})
        numbers = [k for k in (*REFERENCE, "margin") if record.fields.get(k) is not None]
        examples[-1] |= {k: float(record.fields[k]) for k in numbers}
        ids.append(record.name)
    if not examples:
        raise UndeError(f"{source_name(source)} holds no pair with a prompt shorter than {length} tokens")
    if long or dropped:
        left_out = f"; {console.counted(dropped, 'pair')} with a longer prompt left out" if dropped else ""
        console.note(f"{console.counted(long, 'pair')} longer than {length} tokens, cut off there{left_out}")
    return LabelledExamples(examples, ids)


def _tokenized(record: Record, tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """The tokens that both sequences of a pair begin with, up to the answers, and those of each answer."""
    if "chosen_ids" in record.fields:
        prompt = record.fields.get("prompt_ids") or []
        chosen, rejected = (list(field_of(record, f"{side}_ids")) for side in _SIDES)
    else:
        if record.fields.get("prompt") is None:
            record = _split_prompt(record)
        (one, answer), (other, worse) = (completion(record, ("prompt", side), tokenizer) for side in _SIDES)
        start = min(answer.index(True), worse.index(True), common_prefix(one, other))
        prompt, chosen, rejected = one[:start], one[start:], other[start:]
    if not chosen or not rejected:
        raise UndeError(f"{record.where}: an answer without a token. Leave such records out")
    return list(prompt), chosen, rejected


def _split_prompt(record: Record) -> Record:
    """What both answers begin with is the prompt, as TRL has it."""
    chosen, rejected = (field_of(record, side, "the answer") for side in _SIDES)
    if type(chosen) is not type(rejected) or not isinstance(chosen, (str, list)):
        raise UndeError(
            f"{record.where}: 'chosen' is {type(chosen).__name__} and 'rejected' {type(rejected).__name__}, expected "
            "two texts, or two lists of messages"
        )
    start = common_prefix(chosen, rejected)
    if isinstance(chosen, str) and chosen[:start].endswith(" "):
        start -= 1
    fields = {"prompt": chosen[:start], CHOSEN: chosen[start:], REJECTED: rejected[start:]}
    return Record(record.name, record.where, record.fields | fields)


def add_reference(
    pairs: Sequence[Mapping[str, Any]], reference: nn.Module, batch_size: int = 8
) -> LabelledExamples:
    """Add the log-probabilities of both answers under the model that DPO started from.

    Args:
        pairs: Pairs of `read_pairs`, or the `train_dataset` of a DPOTrainer.
        reference: The reference model. For an adapter, the adapted model `with model.disable_adapter():`.
        batch_size: Pairs in one pass.

    Returns:
        The pairs with `ref_chosen_logps` and `ref_rejected_logps`.

    >>> with model.disable_adapter():  # doctest: +SKIP
    ...     train = add_reference(pairs, model)
    """
    task, device = CausalLM("sum"), placement(reference)[0]
    ids = getattr(pairs, "ids", None) or [str(i) for i in range(len(pairs))]
    out = []
    with frozen_eval(reference), torch.no_grad(), console.progress("reference", len(pairs)) as advance:
        for start in range(0, len(pairs), batch_size):
            some = [pairs[i] for i in range(start, min(start + batch_size, len(pairs)))]
            batches = (task.collate([join_answer(e, side) for e in some]) for side in _SIDES)
            log_p = [(-task.loss(reference, to_device(b, device))).tolist() for b in batches]
            out += [{**e, **dict(zip(REFERENCE, values))} for e, values in zip(some, zip(*log_p))]
            advance(len(some))
    return LabelledExamples(out, ids)


def pair_pieces(tokenizer: Any, example: Mapping[str, Any]) -> list[str]:
    """The text of each token: of the prompt with the chosen answer, then of the rejected one.

    The prompt is not repeated: its tokens before the rejected answer, which add nothing, are blank.
    """
    chosen, rejected = (
        pieces(tokenizer, join_answer(example, side)["input_ids"].tolist()) for side in _SIDES
    )
    blank = len(example.get("prompt_ids", ()))
    return list(chain(chosen, [""] * blank, [f"\n[rejected] {rejected[blank]}"], rejected[blank + 1 :]))
