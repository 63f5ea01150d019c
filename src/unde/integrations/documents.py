"""Records from files, and the text of each: one document, named by its "id", or else by its line or row."""

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
from pathlib import Path
from typing import Any, BinaryIO

from unde.errors import UndeError

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet")  # each but the last also as .gz
SAVED = "state.json"  # what save_to_disk of the datasets library writes, beside other files
_SPLITS = "dataset_dict.json"
_AT_ONCE = 1000  # rows of a table

Texts = str | os.PathLike[str] | Sequence[str] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Record:
    name: str
    where: str  # for messages: "train.jsonl, line 3"
    fields: dict[str, Any]


@dataclass(frozen=True)
class Document:
    name: str
    text: str
    where: str


def called(source: Texts) -> str:
    """What messages call it."""
    return str(source) if isinstance(source, (str, os.PathLike)) else "the list"


def read_documents(
    source: Texts, text_field: str = "text", option: str = "--text-field"
) -> Iterator[Document]:
    """The documents of a file, or of a list of texts; `option` is what names the field on the command line, for
    messages.

    >>> [d.name for d in read_documents(["To be", "or not to be"])]
    ['0', '1']
    """
    for record in read_records(source, (text_field,)):
        text = text_of(field_of(record, text_field, option), record.where, repr(text_field))
        if not text.strip():
            raise UndeError(f"{record.where}: the text is empty. Leave such records out")
        yield Document(record.name, text, record.where)


def read_records(source: Texts, columns: Sequence[str]) -> Iterator[Record]:
    """The records of a file, of a folder of the datasets library, or of a list of texts or dicts.

    .jsonl holds one object on each line, .json a list of objects, .csv and .parquet a column for each field, .txt one
    text on each line, blank lines between them not counting. Of tables only `columns` are read, and a text that is no
    record is in the first of them.
    """
    if isinstance(source, (str, os.PathLike)):
        found = _records(Path(source).expanduser(), columns)
    else:
        found = (
            (str(i), f"text {i}", {columns[0]: text} if isinstance(text, str) else text)
            for i, text in enumerate(source)
        )
    for name, where, record in found:
        if not isinstance(record, Mapping):
            expected = f"expected an object with a field {columns[0]!r}"
            raise UndeError(f"{where}: a {type(record).__name__}, {expected}")
        own = record.get("id")
        if isinstance(own, (str, int)) and not isinstance(own, bool) and str(own).strip():
            name = text_of(str(own), where, "'id'")
        yield Record(name, where, dict(record))


def field_of(record: Record, field: str, option: str, what: str = "the text") -> Any:
    if field not in record.fields:
        there = ", ".join(repr(k) for k in record.fields) or "no field at all"
        raise UndeError(
            f"{record.where}: no field {field!r}, there is {there}. Say which field holds {what} ({option})"
        )
    return record.fields[field]


def text_of(value: Any, where: str, what: str) -> str:
    """A text that is one."""
    if not isinstance(value, str):
        raise UndeError(f"{where}: {what} is {type(value).__name__}, expected a text")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        half = value[e.start].encode("unicode_escape").decode()
        raise UndeError(
            f"{where}: character {e.start + 1} is half of a pair ({half}), which is no text. Mend the record, or "
            "leave it out"
        ) from None
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
        return _check_folder(path), False
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


def _check_folder(path: Path) -> str:
    if (path / SAVED).is_file():
        return SAVED
    if (path / _SPLITS).is_file():
        splits = sorted(p.parent.name for p in path.glob(f"*/{SAVED}"))
        raise UndeError(
            f"{path} holds the splits {', '.join(splits)}: name one of them, as in {path / (splits or ['train'])[0]}"
        )
    raise UndeError(
        f"{path} is a folder: expected a file, or a folder that save_to_disk of the datasets library wrote"
    )


def _records(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """(name, where, record) of each record in a file."""
    suffix, packed = check_file(path)
    if suffix in (".parquet", SAVED):
        known, rows = _table(path, suffix)
        wanted = [n for n in (*columns, "id") if n in known]
        for number, record in enumerate(rows(wanted or known[:1]), 1):
            # Without the first column there will be an error, which names all that there are.
            yield (
                str(number),
                f"{path}, row {number}",
                record if columns[0] in known else dict.fromkeys(known),
            )
        return
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            yield from {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".txt": _txt}[suffix](
                file, path, columns[0]
            )
    except (OSError, EOFError, zlib.error) as e:
        raise UndeError(f"cannot read {path}: {e}") from None


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
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UndeError(f"{where}: not JSON ({e}), expected one object on each line") from None
        yield str(number), where, record


def _json(file: Any, path: Path, _: str) -> Iterator[tuple[str, str, Any]]:
    try:
        records = json.loads(file.read())
    except (ValueError, RecursionError) as e:
        raise UndeError(f"{path}: not JSON ({e}). Is it .jsonl, one object on each line?") from None
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
    try:
        from pyarrow import ArrowException

        if suffix == SAVED:
            from datasets import load_from_disk
        else:
            from pyarrow import parquet
    except ImportError as e:
        raise UndeError(
            f"reading {path} needs {e.name}: pip install 'unde[hf]', or convert it to .jsonl"
        ) from None
    try:
        if suffix == SAVED:
            saved: Any = load_from_disk(str(path), keep_in_memory=False).with_format(None)
            known = list(saved.column_names)
        else:
            file = parquet.ParquetFile(path)
            known = list(file.schema_arrow.names)
    except (ArrowException, OSError, ValueError, TypeError, KeyError) as e:
        raise UndeError(f"cannot read {path}: {e}") from None

    def rows(wanted: list[str]) -> Iterator[dict[str, Any]]:
        try:
            if suffix == SAVED:
                for some in saved.select_columns(wanted).iter(_AT_ONCE):
                    yield from (dict(zip(wanted, row)) for row in zip(*(some[name] for name in wanted)))
            else:
                for batch in file.iter_batches(columns=wanted):
                    yield from batch.to_pylist()
        except (ArrowException, OSError) as e:
            raise UndeError(f"cannot read {path}: {e}") from None

    return known, rows
