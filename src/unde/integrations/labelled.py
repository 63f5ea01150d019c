"""Records with two fields as examples: source and target texts, a text and its class, or words and their classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unde import console
from unde.errors import UndeError, explain
from unde.integrations.documents import (
    Record,
    Texts,
    check_length,
    check_tokens,
    columns_of,
    field_of,
    read_records,
    source_name,
    text_of,
)
from unde.tasks.tokens import IGNORE

PAIRS = (("source", "target"), ("prompt", "completion"), ("text", "target"), ("input", "output"))
CLASSES = (("text", "label"), ("text", "labels"), ("sentence", "label"))
TAGS = (("tokens", "ner_tags"), *((a, b) for a in ("tokens", "words") for b in ("tags", "labels")))
_OPTION = "--target-field"


class LabelledExamples(list[dict[str, Tensor]]):
    """Examples {"input_ids", "labels"}, called as their records are."""

    def __init__(self, examples: list[dict[str, Tensor]], ids: list[str]) -> None:
        super().__init__(examples)
        self.ids = ids


class RecordReader:
    """Texts as tokens: at most `length` of them, cut off as in training, with the tokens that end a text.

    `rows` is how many tokens the model knows. `predict` gives the labels that the model itself has for the tokens of a
    text; with it, records need no target.
    """

    def __init__(
        self, tokenizer: Any, length: int, rows: int, predict: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        check_length(length)
        self.tokenizer, self.length, self.rows, self.predict = tokenizer, length, rows, predict

    def examples(
        self, source: Texts, fields: tuple[str, str], read: Callable[[Record], tuple[list[int], Any, bool]]
    ) -> LabelledExamples:
        """One example a record; `read` gives tokens, labels (or a function that predicts them), and whether it cut."""
        examples, ids, long, predicted = [], [], 0, 0
        for record in read_records(source, fields):
            tokens, labels, cut = read(record)
            tokens = torch.tensor(tokens)
            if callable(labels):
                labels, predicted = labels(tokens), predicted + 1
            examples.append({"input_ids": tokens, "labels": torch.as_tensor(labels)})
            ids.append(record.name)
            long += cut
        if not examples:
            raise UndeError(f"{source_name(source)} holds no record: expected at least one")
        if long:
            console.note(
                f"{console.counted(long, 'record')} longer than {self.length} tokens, cut off there (--seq-len)"
            )
        if predicted:
            console.note(f"without {fields[1]!r}: asked about what the model itself says")
        return LabelledExamples(examples, ids)

    def needs_prediction(self, record: Record, field: str) -> bool:
        """Whether there is no target, and need not be one."""
        return self.predict is not None and record.fields.get(field) in (None, "")

    def encode(self, record: Record, **text: Any) -> tuple[Any, bool]:
        """What the tokenizer makes of a text, and whether it was cut off."""
        encoding = self.tokenizer(**text, verbose=False)
        long = len(encoding["input_ids"]) > self.length
        if long:
            encoding = self.tokenizer(**text, truncation=True, max_length=self.length, verbose=False)
        if not encoding["input_ids"]:
            raise UndeError(f"{record.where}: no token at all. Leave such records out")
        check_tokens(record.where, encoding["input_ids"], self.rows)
        return encoding, long


def translations(
    source: Texts, reader: RecordReader, text: str | None, target: str | None
) -> LabelledExamples:
    """Sources and targets."""
    fields = _fields(source, text, target, PAIRS)

    def encode_target(record: Record, value: Any) -> tuple[Any, bool]:
        encoding, long = reader.encode(record, text_target=text_of(value, record.where, repr(fields[1])))
        return encoding["input_ids"], long

    return _label_texts(source, reader, fields, "the target", encode_target)


def classified(
    source: Texts,
    reader: RecordReader,
    text: str | None,
    label: str | None,
    classes: Mapping[Any, Any],
    real: bool,
) -> LabelledExamples:
    """Texts with a class, by its number or its name in the model's config (`classes`), or with a real number."""
    fields = _fields(source, text, label, CLASSES)

    def number(record: Record, value: Any) -> tuple[Any, bool]:
        return _number(record, value, classes, real), False

    return _label_texts(source, reader, fields, "the label", number)


def _label_texts(
    source: Texts,
    reader: RecordReader,
    fields: tuple[str, str],
    what: str,
    label_of: Callable[[Record, Any], tuple[Any, bool]],
) -> LabelledExamples:
    """One text a record; `label_of` gives the label of a value and whether something was cut off."""
    text, target = fields

    def read(record: Record) -> tuple[list[int], Any, bool]:
        words = text_of(field_of(record, text), record.where, repr(text))
        tokens, long = reader.encode(record, text=words)
        if reader.needs_prediction(record, target):
            return tokens["input_ids"], reader.predict, long
        label, longer = label_of(record, field_of(record, target, what, _OPTION))
        return tokens["input_ids"], label, long or longer

    return reader.examples(source, fields, read)


def tagged(
    source: Texts, reader: RecordReader, text: str | None, tags: str | None, classes: Mapping[Any, Any]
) -> LabelledExamples:
    """Lists of words with a class for each: the first token of a word has it, and the others have none."""
    text, tags = fields = _fields(source, text, tags, TAGS)
    if not reader.tokenizer.is_fast:
        raise UndeError(
            f"{type(reader.tokenizer).__name__} does not tell which token belongs to which word: save a fast tokenizer "
            "beside the model, or load the data in Python, as dicts with input_ids and labels"
        )

    def predict_words(tokens: Any) -> Callable[[Tensor], Tensor]:
        assert reader.predict is not None
        predict, others = reader.predict, torch.tensor([w is None for w in _first_of_each(tokens.word_ids())])
        return lambda tokens: predict(tokens).masked_fill(others, IGNORE)

    def read(record: Record) -> tuple[list[int], Any, bool]:
        words = field_of(record, text, "the words")
        if (
            isinstance(words, str) and reader.predict is not None
        ):  # typed: what are words, the tokenizer knows
            tokens, long = reader.encode(record, text=words)
            return tokens["input_ids"], predict_words(tokens), long
        words = [text_of(w, record.where, f"word {i}") for i, w in enumerate(_list(record, words, text), 1)]
        cure = "load it with add_prefix_space=True and save it again"
        with explain(f"the tokenizer takes no lists of words ({{e}}): {cure}", AssertionError, ValueError):
            tokens, long = reader.encode(record, text=words, is_split_into_words=True)
        if reader.needs_prediction(record, tags):
            return tokens["input_ids"], predict_words(tokens), long
        wanted = _list(record, field_of(record, tags, "the classes of words", _OPTION), tags)
        if len(wanted) != len(words):
            raise UndeError(
                f"{record.where}: {len(words)} words and {len(wanted)} in {tags!r}: expected one for each"
            )
        numbers = [v if v == IGNORE else _number(record, v, classes, False) for v in wanted]
        labels = [IGNORE if word is None else numbers[word] for word in _first_of_each(tokens.word_ids())]
        if all(label == IGNORE for label in labels):
            raise UndeError(f"{record.where}: no word has a class. Leave such records out")
        return tokens["input_ids"], labels, long

    return reader.examples(source, fields, read)


def _first_of_each(words: Sequence[int | None]) -> Iterator[int | None]:
    """The word of each token that is its first; None for the others and for special tokens."""
    before = None
    for word in words:
        yield None if word == before else word
        before = word


def _list(record: Record, value: Any, field: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else type(value).__name__
        raise UndeError(
            f"{record.where}: {field!r} is {what}, expected a list with one entry for each word (.jsonl and .parquet "
            "can hold lists, .csv cannot)"
        )
    return value


def _fields(
    source: Texts, text: str | None, target: str | None, known: Sequence[tuple[str, str]]
) -> tuple[str, str]:
    """The fields that are given, else the first known pair of which both, or one, are in the data."""
    columns = columns_of(source)
    both = next(((a, b) for a, b in known if a in columns and b in columns), None)
    pair = both or next(((a, b) for a, b in known if a in columns), known[0])
    if text is not None and both is None:  # the target that goes with a text of another name
        pair = next(((a, b) for a, b in known if b in columns), pair)
    return text or pair[0], target or pair[1]


def _number(record: Record, value: Any, classes: Mapping[Any, Any], real: bool) -> Any:
    if real:
        with explain(f"{record.where}: the label is {value!r}, expected a number", TypeError, ValueError):
            return [float(v) for v in value] if isinstance(value, list) else float(value)
    if isinstance(value, str) and value in classes:
        return int(classes[value])
    text = str(value)
    if not isinstance(value, bool) and text.isdigit() and int(text) < len(classes):
        return int(text)
    raise UndeError(
        f"{record.where}: the label is {value!r}, expected 0 to {len(classes) - 1} or one of "
        f"{', '.join(map(repr, sorted(classes, key=lambda name: classes[name])[:5]))} (label2id of the model's config)"
    )
