"""Texts from files: one document for each record, named by its "id", or else by its line or row."""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from unde.errors import UndeError

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet")  # each but the last also as .gz

Texts = str | os.PathLike[str] | Sequence[str]


@dataclass(frozen=True)
class Document:
    name: str
    text: str
    where: str  # for messages: "train.jsonl, line 3"


def read_documents(
    source: Texts, text_field: str = "text", option: str = "--text-field"
) -> Iterator[Document]:
    """The documents of a file, or of a list of texts.

    .jsonl holds one object on each line, .json a list of objects, .csv a column and .parquet a column of that
    name, .txt one document on each line, blank lines between them not counting. `option` is what names the field
    on the command line, for messages.

    >>> [d.name for d in read_documents(["To be", "or not to be"])]
    ['0', '1']
    """
    if not isinstance(source, (str, os.PathLike)):
        records: Iterator[tuple[str, str, Any]] = (
            (str(i), f"text {i}", {text_field: text}) for i, text in enumerate(source)
        )
    else:
        records = _records(Path(source).expanduser(), text_field)
    for name, where, record in records:
        text = _text(record, text_field, where, option)
        own = record.get("id")
        if isinstance(own, (str, int)) and not isinstance(own, bool) and str(own).strip():
            name = str(own)
        yield Document(name, text, where)


def _text(record: Any, text_field: str, where: str, option: str) -> str:
    if not isinstance(record, dict):
        raise UndeError(f"{where}: a {type(record).__name__}, expected an object with a field {text_field!r}")
    if text_field not in record:
        there = ", ".join(repr(k) for k in record) or "no field at all"
        raise UndeError(
            f"{where}: no field {text_field!r}, there is {there}. Say which field holds the text ({option})"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise UndeError(f"{where}: {text_field!r} is {type(text).__name__}, expected a text")
    for part in (text, str(record.get("id", ""))):
        try:
            part.encode()
        except UnicodeEncodeError as e:
            half = part[e.start].encode("unicode_escape").decode()
            raise UndeError(
                f"{where}: character {e.start + 1} is half of a pair ({half}), which is no text. Mend the record, or "
                "leave it out"
            ) from None
    if not text.strip():
        raise UndeError(f"{where}: the text is empty. Leave such records out")
    return text


def check_file(path: Path) -> tuple[str, bool]:
    """The kind of a file and whether it is packed, after checking that it is there and can be read."""
    packed = path.name.lower().endswith(".gz")
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix not in SUFFIXES or (packed and suffix == ".parquet"):
        raise UndeError(f"cannot read {path}: expected {', '.join(SUFFIXES)} (or .jsonl.gz and the like)")
    if path.is_dir():
        raise UndeError(f"{path} is a folder: expected a file")
    if not path.exists():
        others = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, others, n=1)
        raise UndeError(f"no file {path}" + (f". Did you mean {path.parent / near[0]}?" if near else ""))
    if not path.is_file():
        raise UndeError(f"{path} is no plain file: expected one that can be read more than once")
    return suffix, packed


def _records(path: Path, text_field: str) -> Iterator[tuple[str, str, Any]]:
    """(name, where, record) of each record in a file."""
    suffix, packed = check_file(path)
    if suffix == ".parquet":
        yield from _parquet(path, text_field)
        return
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            yield from {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".txt": _txt}[suffix](
                file, path, text_field
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


def _parquet(path: Path, text_field: str) -> Iterator[tuple[str, str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UndeError(
            f"reading {path} needs pyarrow: pip install 'unde[hf]', or convert it to .jsonl"
        ) from None
    try:
        file, number = parquet.ParquetFile(path), 0
        known = file.schema_arrow.names
        for batch in file.iter_batches(columns=[n for n in (text_field, "id") if n in known] or known[:1]):
            for record in batch.to_pylist():
                number += 1
                shown = record if text_field in known else dict.fromkeys(known)
                yield str(number), f"{path}, row {number}", shown
    except (ArrowException, OSError) as e:
        raise UndeError(f"cannot read {path}: {e}") from None
