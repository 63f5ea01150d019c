"""Which fields of a file are read, and as what: texts, conversations, or prompts with completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from unde import console
from unde.errors import UndeError
from unde.integrations import chat
from unde.integrations.documents import Record, Texts, called, columns_of, field_of, read_records
from unde.integrations.sequences import Sequences, check_known, check_length, cut
from unde.tasks.tokens import IGNORE

MESSAGES, PROMPT, COMPLETION, TEXT = "messages", "prompt", "completion", "text"
_BESIDE = {"id", "tools"}  # read wherever they are


def causal_examples(
    source: Texts,
    tokenizer: Any,
    length: int,
    rows: int,
    text_field: str | None = None,
    target_field: str | None = None,
    option: str = "--text-field",
) -> Sequences | Answers:
    """The training sequences of a causal language model.

    What is not said is read off the fields: `messages`, `prompt` and `completion`, or else `text`. With a target the
    loss is on the target alone, in conversations on what the assistant says, in texts on everything. `rows` is how
    many tokens the model knows.
    """
    text, target = fields_of(source, text_field, target_field)
    if target is None and not _talks(source, text):
        made: Sequences | Answers = Sequences(source, tokenizer, length, rows, text, option)
    else:
        made = Answers(source, tokenizer, length, rows, text, target, option)
    tell_ignored(source, {text, target})
    return made


def fields_of(source: Texts, text_field: str | None, target_field: str | None) -> tuple[str, str | None]:
    """The field of the text or the messages, and that of the target, if there is one."""
    there = columns_of(source)
    if target_field is not None:
        return text_field or PROMPT, target_field
    if text_field is not None:
        return text_field, None
    ways = {MESSAGES: (MESSAGES, None), TEXT: (TEXT, None)}
    found = [way for name, way in ways.items() if name in there]
    if PROMPT in there and COMPLETION in there:
        found.append((PROMPT, COMPLETION))
    if len(found) > 1:
        names = " and ".join(repr(name) for way in found for name in way if name is not None)
        raise UndeError(
            f"{called(source)} has {names}, which can be read in more than one way: say which, as in "
            + " or ".join(
                f"--text-field {text}" + (f" --target-field {target}" if target else "")
                for text, target in found
            )
        )
    return found[0] if found else (TEXT, None)


def tell_ignored(source: Texts, used: set[str | None]) -> None:
    """Say once which columns are left alone."""
    ignored = [repr(name) for name in columns_of(source) if name not in used | _BESIDE]
    if ignored:
        console.note(
            f"{called(source)}: {', '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} not used"
        )


def _talks(source: Texts, field: str) -> bool:
    """Whether a field holds messages."""
    if field not in columns_of(source):
        return False
    first = next(read_records(source, (field,)), None)
    return first is not None and isinstance(first.fields.get(field), list)


class Answers(Dataset):
    """Sequences of at most `length` tokens with labels on what the model was trained to say, and −100 elsewhere.

    Examples are {"input_ids", "labels"}, called "record:part" as those of `Sequences`. What is longer is cut in the
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
        option: str = "--text-field",
    ) -> None:
        check_length(length)
        self.length, self.ids = length, list[str]()
        tokens, counts, lengths, long, dropped = [], [], [], 0, 0
        for record, (found, said) in _marked(source, tokenizer, text, target, option):
            _check(record, found, said, rows)
            start, cuts = 0, cut(len(found), length)
            long += len(cuts) > 1
            for part, size in enumerate(cuts, 1):
                here = slice(start, start + size)
                start += size
                if not any(said[here][1:]):  # the first token of a sequence is predicted from nothing
                    dropped += 1
                    continue
                tokens.append(np.asarray(found[here], dtype=np.int32))
                counts.append(np.asarray(said[here], dtype=bool))
                lengths.append(size)
                self.ids.append(f"{record.name}:{part}")
        if not tokens:
            raise UndeError(f"{called(source)} holds no record with an answer: expected at least one")
        self.tokens, self.counts = np.concatenate(tokens), np.concatenate(counts)
        self.stops = np.cumsum(lengths)
        _tell(source, tokenizer, target, length, long, dropped)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        here = slice(self.stops[index - 1] if index else 0, self.stops[index])
        tokens = torch.from_numpy(self.tokens[here].astype(np.int64))
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(torch.from_numpy(~self.counts[here]), IGNORE),
        }


def _marked(
    source: Texts, tokenizer: Any, text: str, target: str | None, option: str
) -> Iterator[tuple[Record, chat.Marked]]:
    columns = (text, "tools") if target is None else (text, target, "tools")
    for record in read_records(source, columns):
        field_of(record, text, option)
        if target is None:
            yield record, chat.conversation(record, text, tokenizer)
        else:
            field_of(record, target, "--target-field", "the target")
            yield record, chat.completion(record, (text, target), tokenizer)


def _check(record: Record, tokens: list[int], counts: list[bool], rows: int) -> None:
    if not any(counts[1:]):
        raise UndeError(
            f"{record.where}: no token carries loss: the answer is empty, or the chat template leaves it out. Leave "
            "such records out"
        )
    check_known(record.where, tokens, rows)


def _tell(source: Texts, tokenizer: Any, target: str | None, length: int, long: int, dropped: int) -> None:
    if target is not None:
        how = f"the loss is on {target!r} alone"
    elif chat.marks_answers(tokenizer):
        how = "the loss is on the assistant's turns, as the chat template marks them"
    else:
        how = (
            "the loss is on the assistant's turns, found by writing the conversation turn by turn: the chat template "
            "does not mark them"
        )
    console.line(f"{called(source)}: {how}")
    if long:
        console.note(
            f"{called(source)}: {console.counted(long, 'record')} longer than {length} tokens (--seq-len), cut into "
            "parts that do not see each other"
            + (f"; {console.counted(dropped, 'part')} without an answer left out" if dropped else "")
        )
