"""Records with two fields as examples: a source text and its target text, or a text and its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from unde import console
from unde.errors import UndeError
from unde.integrations.documents import Record, Texts, columns_of, field_of, read_records, text_of

PAIRS = (("source", "target"), ("prompt", "completion"), ("text", "target"), ("input", "output"))
CLASSES = (("text", "label"), ("text", "labels"), ("sentence", "label"))


class Labelled(Dataset):
    """Examples {"input_ids", "labels"}, called as their records are."""

    def __init__(self, examples: list[dict[str, torch.Tensor]], ids: list[str]) -> None:
        if not examples:
            raise UndeError("the data hold no record: expected at least one")
        self.examples, self.ids = examples, ids

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.examples[index]


def translations(
    source: Texts, tokenizer: Any, length: int, rows: int, text: str | None, target: str | None
) -> Labelled:
    """Sources and targets, each of `length` tokens at most: what is longer is cut off, as in training."""
    text, target = _fields(source, text, target, PAIRS)
    examples, ids, long = [], [], 0
    for record in read_records(source, (text, target)):
        words = text_of(field_of(record, text, "--text-field"), record.where, text)
        answer = text_of(field_of(record, target, "--target-field"), record.where, target)
        found = [tokenizer(words)["input_ids"], tokenizer(text_target=answer)["input_ids"]]
        long += any(len(x) > length for x in found)
        examples.append(
            {
                n: torch.tensor(_checked(record, x[:length], rows))
                for n, x in zip(("input_ids", "labels"), found)
            }
        )
        ids.append(record.name)
    if long:
        console.note(
            f"{console.counted(long, 'record')} longer than {length} tokens, cut off there (--seq-len)"
        )
    return Labelled(examples, ids)


def classified(
    source: Texts,
    tokenizer: Any,
    length: int,
    rows: int,
    text: str | None,
    label: str | None,
    classes: Mapping[Any, Any],
    real: bool,
) -> Labelled:
    """Texts with a class, by its number or by the name that the model's config has for it (`classes`), or with a real
    number."""
    text, label = _fields(source, text, label, CLASSES)
    examples, ids, long = [], [], 0
    for record in read_records(source, (text, label)):
        words = text_of(field_of(record, text, "--text-field"), record.where, text)
        found = tokenizer(words)["input_ids"]
        long += len(found) > length
        value = _number(record, field_of(record, label, "--target-field"), classes, real)
        tokens = torch.tensor(_checked(record, found[:length], rows))
        examples.append({"input_ids": tokens, "labels": torch.tensor(value)})
        ids.append(record.name)
    if long:
        console.note(
            f"{console.counted(long, 'record')} longer than {length} tokens, cut off there (--seq-len)"
        )
    return Labelled(examples, ids)


def _fields(
    source: Texts, text: str | None, target: str | None, known: Sequence[tuple[str, str]]
) -> tuple[str, str]:
    there = columns_of(source)
    found = next(((a, b) for a, b in known if a in there and b in there), known[0])
    return text or found[0], target or found[1]


def _checked(record: Record, tokens: list[int], rows: int) -> list[int]:
    if not tokens:
        raise UndeError(f"{record.where}: no token at all. Leave such records out")
    if max(tokens) >= rows:
        raise UndeError(
            f"{record.where}: the tokenizer gives token {max(tokens)}, the model knows 0 to {rows - 1}. "
            "The tokenizer is not the model's"
        )
    return tokens


def _number(record: Record, value: Any, classes: Mapping[Any, Any], real: bool) -> Any:
    if real:
        try:
            values = [float(v) for v in (value if isinstance(value, list) else [value])]
            return values if isinstance(value, list) else values[0]
        except (TypeError, ValueError):
            raise UndeError(f"{record.where}: the label is {value!r}, expected a number") from None
    if isinstance(value, str) and value in classes:
        return int(classes[value])
    text = str(value)
    if not isinstance(value, bool) and text.isdigit() and int(text) < len(classes):
        return int(text)
    raise UndeError(
        f"{record.where}: the label is {value!r}, expected 0 to {len(classes) - 1} or one of "
        f"{', '.join(map(repr, sorted(classes, key=lambda name: classes[name])[:5]))} (label2id of the model's config)"
    )
