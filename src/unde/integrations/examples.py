"""Training sequences of causal language models: texts, conversations, or prompts with completions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from unde import console
from unde.errors import UndeError, explain, unknown
from unde.integrations.documents import (
    Record,
    Texts,
    TextSequences,
    check_length,
    check_tokens,
    columns_of,
    cut_slices,
    field_of,
    read_records,
    source_name,
    text_of,
)
from unde.tasks.tokens import IGNORE

MESSAGES, PROMPT, COMPLETION, TEXT = "messages", "prompt", "completion", "text"
_ALWAYS = {"id", "tools"}  # fields that are always read
ASSISTANT = "assistant"
ANSWERS, ALL = LOSS_ON = ("answers", "all")  # tokens that carry loss
MaskedTokens = tuple[list[int], list[bool]]  # tokens, and which of them carry loss
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def causal_examples(
    source: Texts,
    tokenizer: Any,
    length: int,
    rows: int,
    text_field: str | None = None,
    target_field: str | None = None,
    loss_on: str = ANSWERS,
) -> TextSequences:
    """The training sequences of a causal language model.

    What is not said is read off the fields: `messages`, `prompt` and `completion`, or else `text`. With a target the
    loss is on the target alone, in conversations on what the assistant says, in texts on everything; with
    loss_on="all" it is on all tokens. `rows` is how many tokens the model knows.
    """
    if loss_on not in LOSS_ON:
        raise unknown("loss_on", loss_on, LOSS_ON)
    text, target = fields_of(source, text_field, target_field)
    columns = columns_of(source)
    first = next(read_records(source, (text,)), None) if text in columns else None
    if target is None and not (first and isinstance(first.fields.get(text), list)):
        sequences = TextSequences(source, tokenizer, length, rows, text)
    else:
        sequences = AnswerSequences(source, tokenizer, length, rows, text, target, loss_on)
    ignored = [repr(name) for name in columns if name not in {text, target, *_ALWAYS}]
    if ignored:
        console.note(f"{source_name(source)}: the model does not read {', '.join(ignored)}")
    return sequences


def fields_of(source: Texts, text_field: str | None, target_field: str | None) -> tuple[str, str | None]:
    """The field of the text or the messages, and that of the target, if there is one."""
    columns = columns_of(source)
    if target_field is not None:
        return text_field or PROMPT, target_field
    if text_field is not None:
        return text_field, None
    ways = ((MESSAGES, None), (TEXT, None), (PROMPT, COMPLETION))
    matches = [(text, target) for text, target in ways if {text, target or text} <= set(columns)]
    if len(matches) > 1:
        names = " and ".join(repr(name) for way in matches for name in way if name is not None)
        options = (
            f"--text-field {text}" + (f" --target-field {target}" if target else "")
            for text, target in matches
        )
        raise UndeError(
            f"{source_name(source)} has {names}, which can be read in more than one way: say which, as in "
            + " or ".join(options)
        )
    return matches[0] if matches else (TEXT, None)


class AnswerSequences(TextSequences):
    """Sequences of at most `length` tokens with labels on what the model was trained to say, and −100 elsewhere.

    Examples are {"input_ids", "labels"}, called "record:part" as those of `TextSequences`. What is longer is cut in the
    same way; parts without any label are left out.
    """

    def __init__(
        self,
        source: Texts,
        tokenizer: Any,
        length: int,
        rows: int,
        text: str,
        target: str | None = None,
        loss_on: str = ANSWERS,
    ) -> None:
        check_length(length)
        self.length, self.ids = length, list[str]()
        tokens, counts, long, dropped = [], [], 0, 0
        for record in read_records(source, [name for name in (text, target, "tools") if name]):
            field_of(record, text)
            if target is None:
                ids, has_loss = conversation(record, text, tokenizer, loss_on)
            else:
                field_of(record, target, "the target", "--target-field")
                ids, has_loss = completion(record, (text, target), tokenizer)
            if loss_on == ALL:
                has_loss = [True] * len(ids)
            if not any(has_loss[1:]):
                raise UndeError(
                    f"{record.where}: no token carries loss: the answer is empty, or the chat template leaves it out"
                )
            check_tokens(record.where, ids, rows)
            parts = cut_slices(len(ids), length)
            long += len(parts) > 1
            for part, where in enumerate(parts, 1):
                if not any(has_loss[where][1:]):  # the first token of a sequence is predicted from nothing
                    dropped += 1
                    continue
                tokens.append(np.asarray(ids[where], dtype=np.int32))
                counts.append(np.asarray(has_loss[where], dtype=bool))
                self.ids.append(f"{record.name}:{part}")
        if not tokens:
            raise UndeError(f"{source_name(source)} holds no record with an answer: expected at least one")
        self.tokens, self.counts = np.concatenate(tokens), np.concatenate(counts)
        self.stops = np.cumsum([len(x) for x in tokens])
        _note_loss(source, tokenizer, target, loss_on, length, long, dropped)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)["input_ids"]
        silent = torch.from_numpy(~self.counts[self.where(index)])
        return {"input_ids": tokens, "labels": tokens.masked_fill(silent, IGNORE)}


def _note_loss(
    source: Texts, tokenizer: Any, target: str | None, loss_on: str, length: int, long: int, dropped: int
) -> None:
    if loss_on == ALL:
        how = "the loss is on all tokens"
    elif target is not None:
        how = f"the loss is on {target!r} alone"
    elif marks_answers(tokenizer):
        how = "the loss is on the assistant's turns, as the chat template marks them"
    else:
        how = "the loss is on the assistant's turns, found turn by turn: the chat template does not mark them"
    console.line(f"{source_name(source)}: {how}")
    if long:
        console.note(
            f"{source_name(source)}: {console.counted(long, 'record')} longer than {length} tokens (--seq-len), cut "
            "into parts that do not see each other"
            + (f"; {console.counted(dropped, 'part')} without an answer left out" if dropped else "")
        )


def marks_answers(tokenizer: Any) -> bool:
    """Whether the chat template itself says what the assistant generates."""
    template = getattr(tokenizer, "chat_template", None)
    return isinstance(template, str) and tokenizer.is_fast and _GENERATION.search(template) is not None


def messages_of(value: Any, where: str, what: str) -> list[dict[str, Any]]:
    """Messages that are a list of {role, content}; entries that a table has left empty are left out."""
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else type(value).__name__
        raise UndeError(f"{where}: {what} is {kind}, expected a list of messages {{role, content}}")
    out = []
    for number, message in enumerate(value, 1):
        at = f"{where}: message {number}"
        if not isinstance(message, dict):
            raise UndeError(f"{at} is {type(message).__name__}, expected an object {{role, content}}")
        message = {k: v for k, v in message.items() if v is not None}
        if "role" not in message:
            there = ", ".join(map(repr, message)) or "nothing"
            raise UndeError(f"{at} has no 'role', there is {there}: expected an object {{role, content}}")
        text_of(message["role"], at, "'role'")
        if "content" in message or "tool_calls" not in message:
            text_of(message.get("content"), at, "'content'")
        out.append(message)
    return out


def conversation(record: Record, field: str, tokenizer: Any, loss_on: str = ANSWERS) -> MaskedTokens:
    """The tokens of a record's messages through the chat template, with a loss on the assistant's turns, or on all."""
    messages = messages_of(record.fields.get(field), record.where, repr(field))
    if loss_on == ALL:
        text = _renderer(record, tokenizer)(messages, False)
        return _tokens(tokenizer, text, [(0, len(text))], special=False)
    if not any(m["role"] == ASSISTANT for m in messages):
        roles = ", ".join(dict.fromkeys(repr(m["role"]) for m in messages))
        raise UndeError(
            f"{record.where}: no message of the role {ASSISTANT!r}, there is {roles}: nothing that a model was "
            "trained to say. Leave such records out"
        )
    render = _renderer(record, tokenizer)
    if marks_answers(tokenizer):
        with _template_errors(record):
            encoding = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **_tools(record)
            )
        return list(encoding["input_ids"]), [bool(x) for x in encoding["assistant_masks"]]
    text, spans = render(messages, False), []
    for turn in (i for i, m in enumerate(messages) if m["role"] == ASSISTANT):
        start = _answer_start(record, render, messages[:turn], text)
        upto = render(messages[: turn + 1], False)
        stop = len(upto) if text.startswith(upto) else _answer_stop(record, messages[turn], start, upto, text)
        spans.append((start, stop))
    return _tokens(tokenizer, text, spans, special=False)


def completion(record: Record, fields: tuple[str, str], tokenizer: Any) -> MaskedTokens:
    """The tokens of a prompt and its completion, texts or messages, with a loss on all of the completion.

    The token that ends a text is put behind a completion that is a text, as trainings do, unless it is there.
    """
    prompt, answer = (record.fields.get(field) for field in fields)
    where = record.where
    if isinstance(prompt, list) != isinstance(answer, list):
        raise UndeError(
            f"{where}: {fields[0]!r} is {type(prompt).__name__} and {fields[1]!r} {type(answer).__name__}, expected "
            "two texts, or two lists of messages"
        )
    if isinstance(prompt, list):
        before, after = (messages_of(record.fields[f], where, repr(f)) for f in fields)
        render = _renderer(record, tokenizer)
        text = render(before + after, False)
        return _tokens(
            tokenizer, text, [(_answer_start(record, render, before, text), len(text))], special=False
        )
    prompt, answer = (text_of(record.fields.get(f), where, repr(f)) for f in fields)
    if not answer.strip():
        raise UndeError(f"{where}: {fields[1]!r} is empty: nothing to predict. Leave such records out")
    text = prompt + answer
    tokens, counts = _tokens(tokenizer, text, [(len(prompt), len(text))], special=True)
    end = tokenizer.eos_token_id
    if end is not None and tokens[-1] != end:
        return [*tokens, end], [*counts, True]
    return tokens, [*counts[:-1], counts[-1] or tokens[-1] == end]


def _renderer(record: Record, tokenizer: Any) -> Callable[[list[dict[str, Any]], bool], str]:
    """A function that renders messages by the chat template, with the header of an answer or without."""
    if not getattr(tokenizer, "chat_template", None):
        raise UndeError(
            f"{record.where} holds messages, and the tokenizer has no chat template: save the tokenizer that the model "
            "was trained with (tokenizer.chat_template), or give texts"
        )
    more = _tools(record)

    def render(messages: list[dict[str, Any]], header: bool) -> str:
        if not messages:
            return ""
        with _template_errors(record):
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=header, **more
            )

    return render


def _tools(record: Record) -> dict[str, Any]:
    tools = record.fields.get("tools")
    if isinstance(tools, str):
        with explain(f"{record.where}: 'tools' is not JSON ({{e}})", ValueError):
            tools = json.loads(tools)
    if tools and not isinstance(tools, list):
        raise UndeError(f"{record.where}: 'tools' is {type(tools).__name__}, expected a list")
    return {"tools": tools} if tools else {}


def _answer_start(
    record: Record,
    render: Callable[[list[dict[str, Any]], bool], str],
    before: list[dict[str, Any]],
    text: str,
) -> int:
    """Where, in the text of a conversation, the answer to the messages `before` begins: behind its header."""
    if not before:
        return 0
    closed = render(before, False)
    if not text.startswith(closed):
        raise _rewrite_error(record)
    if before[-1]["role"] == ASSISTANT:
        return len(closed)
    # A header may promise what this answer does not have, such as room for thoughts: as far as they agree.
    return max(len(closed), common_prefix(render(before, True), text))


def _answer_stop(record: Record, message: dict[str, Any], start: int, alone: str, text: str) -> int:
    """End of a turn that the template writes differently when it is the last one: after its content."""
    content = message.get("content", "").strip()
    at = text.find(content, start) if content and content in alone else -1
    if at < 0:
        raise _rewrite_error(record)
    stop, end = at + len(content), alone[alone.rindex(content) + len(content) :]
    return stop + len(end) if text.startswith(end, stop) else stop


def _tokens(tokenizer: Any, text: str, spans: list[tuple[int, int]], special: bool) -> MaskedTokens:
    """The tokens of a text, and which of them have a character in one of the spans."""
    if tokenizer.is_fast:
        encoding = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        at = encoding["offset_mapping"]
        return encoding["input_ids"], [any(a < stop and b > start for start, stop in spans) for a, b in at]
    # Without places in the text: as far as the tokens of what is before agree with those of the whole.
    tokens = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    counts = [False] * len(tokens)
    for start, stop in spans:
        first, last = (
            common_prefix(
                tokens, tokenizer(text[:end], add_special_tokens=special, verbose=False)["input_ids"]
            )
            for end in (start, stop)
        )
        last = len(tokens) if stop == len(text) else last
        counts[first:last] = [True] * (last - first)
    return tokens, counts


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How long the beginning is that both have."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _template_errors(record: Record) -> AbstractContextManager[None]:
    """Templates are programs: they raise what they like."""
    return explain(f"{record.where}: the chat template refuses these messages ({{e}})", Exception)


def _rewrite_error(record: Record) -> UndeError:
    return UndeError(
        f"{record.where}: the chat template writes earlier turns otherwise once others follow, so that the turns of "
        "the assistant cannot be told apart. Put {% generation %} around them in the template, or give prompt and "
        "completion"
    )
