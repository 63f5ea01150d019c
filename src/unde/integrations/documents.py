"""Records of files and lists, named by their "id" or else by line or row; their texts as sequences of tokens."""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.data import Dataset

from unde.errors import UndeError, explain
from unde.integrations import require

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet")  # each but the last also as .gz
SAVED = "state.json"  # what save_to_disk of the datasets library writes, beside other files
TEXT_OPTION = "--text-field, of queries --query-field"
_SPLITS = "dataset_dict.json"
_AT_ONCE = 1000  # rows of a table, or documents for the tokenizer
_SHORTEST = 3  # tokens; with two, a part of one token, with nothing to predict, could not be avoided

TokenParts = tuple[list[int], list[int], list[int]]  # tokens before a text, of the text, after it
Texts = str | os.PathLike[str] | Sequence[str] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Record:
    name: str
    where: str  # for messages: "train.jsonl, line 3"
    fields: dict[str, Any]


def source_name(source: Texts) -> str:
    """The name for messages."""
    return str(source) if isinstance(source, (str, os.PathLike)) else "the list"


def read_documents(source: Texts, text_field: str = "text") -> Iterator[tuple[Record, str]]:
    """Records with their texts."""
    for record in read_records(source, (text_field,)):
        text = text_of(field_of(record, text_field), record.where, repr(text_field))
        if not text.strip():
            raise UndeError(f"{record.where}: the text is empty. Leave such records out")
        yield record, text


def read_records(source: Texts, columns: Sequence[str]) -> Iterator[Record]:
    """The records of a file, of a folder of the datasets library, or of a list of texts or dicts.

    .jsonl holds one object on each line, .json a list of objects, .csv and .parquet a column for each field, .txt one
    text on each line, blank lines between them not counting. Of tables only `columns` are read, and a text that is no
    record is in the first of them.
    """
    if isinstance(source, (str, os.PathLike)):
        records = _records(Path(source).expanduser(), columns)
    else:
        texts = ({columns[0]: text} if isinstance(text, str) else text for text in source)
        records = ((str(i), f"text {i}", record) for i, record in enumerate(texts))
    for name, where, record in records:
        if not isinstance(record, Mapping):
            raise UndeError(
                f"{where}: a {type(record).__name__}, expected an object with a field {columns[0]!r}"
            )
        identifier = record.get("id")
        if type(identifier) in (str, int) and str(identifier).strip():
            name = text_of(str(identifier), where, "'id'")
        yield Record(name, where, dict(record))


def field_of(record: Record, field: str, what: str = "the text", option: str = TEXT_OPTION) -> Any:
    if field not in record.fields:
        names = ", ".join(repr(k) for k in record.fields) or "no field at all"
        raise UndeError(
            f"{record.where}: no field {field!r}, there is {names}. Say which field holds {what} ({option})"
        )
    return record.fields[field]


def text_of(value: Any, where: str, what: str) -> str:
    """Check that a value is a text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise UndeError(f"{where}: {what} is {type(value).__name__}, expected a text")
    half = next((i for i, c in enumerate(value) if "\ud800" <= c <= "\udfff"), None)
    if half is not None:
        code = value[half].encode("unicode_escape").decode()
        raise UndeError(f"{where}: character {half + 1} is half of a pair ({code}), which is no text")
    return value


def columns_of(source: Texts) -> list[str]:
    """The fields of the first record; none for texts that are no records."""
    if not isinstance(source, (str, os.PathLike)):
        first = source[0] if len(source) else None
        return [str(k) for k in first] if isinstance(first, Mapping) else []
    path = Path(source).expanduser()
    suffix, _ = check_file(path)
    if suffix == ".txt":
        return []
    if suffix in (".parquet", SAVED):
        return _table(path, suffix)[0]
    _, _, record = next(_records(path, ("text",)), ("", "", {}))
    return [str(k) for k in record] if isinstance(record, dict) else []


def check_file(path: Path) -> tuple[str, bool]:
    """The kind of a file and whether it is packed, after checking that it is there and can be read.

    The kind is how its name ends; of a folder of the datasets library it is `SAVED`.
    """
    if path.is_dir():
        if (path / SAVED).is_file():
            return SAVED, False
        if not (path / _SPLITS).is_file():
            raise UndeError(
                f"{path} is a folder: expected a file, or what save_to_disk of the datasets library wrote"
            )
        splits = sorted(p.parent.name for p in path.glob(f"*/{SAVED}"))
        name = path / (splits or ["train"])[0]
        raise UndeError(f"{path} holds the splits {', '.join(splits)}: name one of them, as in {name}")
    packed = path.name.lower().endswith(".gz")
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix not in SUFFIXES or (packed and suffix == ".parquet"):
        raise UndeError(
            f"cannot read {path}: expected {', '.join(SUFFIXES)} (or .jsonl.gz and the like), or a folder that "
            "save_to_disk of the datasets library wrote"
        )
    if not path.exists():
        others = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, others, n=1)
        raise UndeError(f"no file {path}" + (f". Did you mean {path.parent / near[0]}?" if near else ""))
    if not path.is_file():
        raise UndeError(f"{path} is no plain file: expected one that can be read more than once")
    return suffix, packed


def _records(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """(name, where, record) of each record in a file."""
    suffix, packed = check_file(path)
    if suffix in (".parquet", SAVED):
        known, rows = _table(path, suffix)
        wanted = [n for n in (*columns, "id") if n in known]
        for number, record in enumerate(rows(wanted or known[:1]), 1):
            # Without the first column there will be an error, which names all that there are.
            record = record if columns[0] in known else dict.fromkeys(known)
            yield str(number), f"{path}, row {number}", record
        return
    read = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".txt": _txt}[suffix]
    with (
        explain(f"cannot read {path}: {{e}}", OSError, EOFError, zlib.error),
        gzip.open(path, "rb") if packed else open(path, "rb") as file,
    ):
        yield from read(file, path, columns[0])


def _lines(file: BinaryIO | gzip.GzipFile, path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file, 1):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as e:
            raise UndeError(f"{path}, line {number}: not UTF-8 ({e.reason})") from None


def _jsonl(file: Any, path: Path, _: str) -> Iterator[tuple[str, str, Any]]:
    for number, line in _lines(file, path):
        if not line.strip():
            continue  # between records or after the last one
        where = f"{path}, line {number}"
        with explain(
            f"{where}: not JSON ({{e}}), expected one object on each line", ValueError, RecursionError
        ):
            record = json.loads(line)
        yield str(number), where, record


def _json(file: Any, path: Path, _: str) -> Iterator[tuple[str, str, Any]]:
    with explain(
        f"{path}: not JSON ({{e}}). Is it .jsonl, one object on each line?", ValueError, RecursionError
    ):
        records = json.loads(file.read())
    if not isinstance(records, list):
        raise UndeError(f"{path}: a {type(records).__name__}, expected a list of objects")
    for number, record in enumerate(records, 1):
        yield str(number), f"{path}, record {number}", record


def _csv(file: Any, path: Path, _: str) -> Iterator[tuple[str, str, Any]]:
    whole = io.StringIO("".join(line for _, line in _lines(file, path)), newline="")
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(whole, strict=True)
    try:
        for number, record in enumerate(reader, 1):
            where = f"{path}, line {reader.line_num}"
            if None in record or None in record.values():
                raise UndeError(
                    f"{where}: expected {len(reader.fieldnames or ())} values, as in the first line"
                )
            yield str(number), where, record
    except csv.Error as e:
        raise UndeError(f"{path}, after line {reader.line_num}: not CSV ({e})") from None


def _txt(file: Any, path: Path, text_field: str) -> Iterator[tuple[str, str, Any]]:
    for number, line in _lines(file, path):
        if line.strip():
            yield str(number), f"{path}, line {number}", {text_field: line.rstrip("\r\n")}


def _table(path: Path, suffix: str) -> tuple[list[str], Callable[[list[str]], Iterator[dict[str, Any]]]]:
    """The columns of a table, and what reads the rows of some of them, a few at a time."""
    failure = require("pyarrow").ArrowException
    message = f"cannot read {path}: {{e}}"
    with explain(message, failure, OSError, ValueError, TypeError, KeyError):
        if suffix == SAVED:
            saved = require("datasets").load_from_disk(str(path), keep_in_memory=False).with_format(None)
            known = list(saved.column_names)
        else:
            file = require("pyarrow.parquet").ParquetFile(path)
            known = list(file.schema_arrow.names)

    def rows(wanted: list[str]) -> Iterator[dict[str, Any]]:
        with explain(message, failure, OSError):
            if suffix == SAVED:
                for some in saved.select_columns(wanted).iter(_AT_ONCE):
                    yield from (dict(zip(wanted, row)) for row in zip(*(some[name] for name in wanted)))
            else:
                for batch in file.iter_batches(columns=wanted):
                    yield from batch.to_pylist()

    return known, rows


class TextSequences(Dataset):
    """Consecutive sequences of at most `length` tokens, each an example {"input_ids"} with the id "document:part".

    Parts count from 1; the last ones may be shorter (see `cut`). Only the first part of a document begins with
    what the tokenizer puts at the start of a text; if they are `framed`, every part is begun and ended as a text is,
    with the [CLS] and [SEP] of BERT for example.
    """

    def __init__(
        self,
        source: Texts,
        tokenizer: Any,
        length: int,
        rows: int,
        text_field: str = "text",
        framed: bool = False,
    ) -> None:
        """`rows` is how many tokens the model knows; the rest as in `read_documents`."""
        check_length(length)
        self.length, self.ids = length, list[str]()
        tokens = []
        documents = read_documents(source, text_field)
        for record, (before, text, after) in _tokenize(documents, tokenizer, framed):
            least = 1 if framed else 2
            if len(text) < least:
                raise UndeError(
                    f"{record.where}: {record.fields[text_field][:20]!r} is {len(text)} token long, expected at least "
                    f"{least}: there is nothing to predict. Leave such texts out"
                )
            check_tokens(record.where, text, rows)
            room = length - len(before) - len(after)
            if room < 1:
                raise UndeError(
                    f"sequences of {length} tokens have no room beside the {length - room} that begin and end each: "
                    "expected more (--seq-len)"
                )
            for part, where in enumerate(cut_slices(len(text), room), 1):
                tokens.append(np.asarray([*before, *text[where], *after], dtype=np.int32))
                self.ids.append(f"{record.name}:{part}")
        if not tokens:
            raise UndeError(f"{source_name(source)} holds no text: expected at least one")
        self.tokens, self.stops = np.concatenate(tokens), np.cumsum([len(x) for x in tokens])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self.tokens[self.where(index)].astype(np.int64))}

    def where(self, index: int) -> slice:
        """The tokens of one example."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return slice(self.stops[index - 1] if index else 0, self.stops[index])


def cut(count: int, length: int) -> list[int]:
    """How long the parts of a document are: whole ones, then a shorter rest.

    If the rest is less than half of a whole part, the last two parts share evenly. The gradient of a few tokens
    is large and says little, so that rests of a word or two would crowd out everything else.

    >>> cut(5, 8), cut(16, 8), cut(21, 8), cut(17, 8)
    ([5], [8, 8], [8, 8, 5], [8, 5, 4])
    """
    whole, rest = divmod(count, length)
    parts = [length] * whole + [rest] * (rest > 0)
    if whole and 0 < rest < length / 2:
        parts[-2:] = [(length + rest + 1) // 2, (length + rest) // 2]
    return parts


def cut_slices(count: int, length: int) -> list[slice]:
    """The places of the parts that `cut` makes."""
    stops = np.cumsum(cut(count, length)).tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops)]


def _tokenize(
    documents: Iterator[tuple[Record, str]], tokenizer: Any, framed: bool
) -> Iterator[tuple[Record, TokenParts]]:
    while some := list(islice(documents, _AT_ONCE)):
        how = {"return_attention_mask": False, "verbose": False}
        records, texts = [record for record, _ in some], [text for _, text in some]
        tokens = tokenizer(texts, **how)["input_ids"]
        if framed:
            bare = tokenizer(texts, add_special_tokens=False, **how)["input_ids"]
            yield from zip(records, map(_split, records, tokens, bare))
        else:
            yield from ((record, ([], ids, [])) for record, ids in zip(records, tokens))


def _split(record: Record, tokens: list[int], bare: list[int]) -> TokenParts:
    start = next((i for i in range(len(tokens) - len(bare) + 1) if tokens[i : i + len(bare)] == bare), None)
    if start is None:
        raise UndeError(
            f"{record.where}: the tokenizer reads the text otherwise when nothing is put around it, so it cannot be "
            "cut into parts"
        )
    return tokens[:start], bare, tokens[start + len(bare) :]


def check_length(length: int) -> None:
    if length < _SHORTEST:
        raise UndeError(f"sequences of {length} tokens: expected at least {_SHORTEST} (--seq-len)")


def check_tokens(where: str, tokens: list[int], rows: int) -> None:
    """Raises unless a model of so many `rows`, one for each token, knows the tokens of a text."""
    if max(tokens) >= rows:
        raise UndeError(
            f"{where}: the tokenizer gives token {max(tokens)}, the model knows 0 to {rows - 1}. "
            "The tokenizer is not the model's"
        )


def pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    """The text of each token; together they are the text. Of a character that several tokens share, the last
    one has it, and the others have none."""

    def text(start: int, stop: int) -> str:
        return tokenizer.decode(tokens[start:stop], clean_up_tokenization_spaces=False)

    out: list[str] = []
    start = read = 0  # decoded from `start`, which is before `read`: a token alone can lose its leading space
    for stop in range(1, len(tokens) + 1):
        known, now = text(start, read), text(start, stop)
        whole = not now.endswith("\ufffd") or stop == len(tokens)  # else more bytes of a character may follow
        out.append(now[len(known) :] if whole else "")
        if whole:
            start, read = read, stop
    return out
