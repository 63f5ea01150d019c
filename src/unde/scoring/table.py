"""The best training examples as a table: for pandas, and as files that other programs read."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from unde.console import cell
from unde.errors import UndeError, unknown
from unde.store.files import CannotWrite, write_atomically
from unde.store.remote import StorePath, Unreachable, place

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "json", "jsonl", "parquet")


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of one length.

    >>> table = Table({"id": ["a", "=b"], "score": [0.5, -1.0]})
    >>> list(table.rows())
    [{'id': 'a', 'score': 0.5}, {'id': '=b', 'score': -1.0}]
    >>> print(table.content("jsonl").decode(), end="")
    {"id": "a", "score": 0.5}
    {"id": "=b", "score": -1.0}
    """

    columns: Mapping[str, Sequence[Any] | np.ndarray]

    def __len__(self) -> int:
        return max(map(len, self.columns.values()), default=0)

    def rows(self) -> Iterator[dict[str, Any]]:
        """As plain Python values."""
        values = [c.tolist() if isinstance(c, np.ndarray) else c for c in self.columns.values()]
        return (dict(zip(self.columns, row)) for row in zip(*values))

    def to_pandas(self) -> pd.DataFrame:
        return need_library("pandas").DataFrame(dict(self.columns))

    def content(self, format: str) -> bytes:
        """All of it as a file: "csv" (what a spreadsheet would run is quoted), "json" (one list), "jsonl" (an object on
        each line) or "parquet"."""
        if format == "parquet":
            return self._parquet()
        return "".join(self.text(format)).encode("utf-8", "surrogatepass")

    def text(self, format: str) -> Iterator[str]:
        """The same in pieces, for formats that are text."""
        if format == "csv":
            return _csv(list(self.columns), self.rows())
        if format == "jsonl":
            return (json.dumps(row) + "\n" for row in self.rows())
        if format == "json":
            return iter([json.dumps(list(self.rows()), indent=1), "\n"])
        raise unknown("format", format, FORMATS)

    def save(self, path: str | os.PathLike[str] | StorePath, format: str | None = None) -> None:
        """Write a file, by default in the format that its name ends in: all of it, or none of it after an error."""
        content = self.content(format or format_of(path))
        try:
            write_atomically(place(path), content)
        except Unreachable:
            raise
        except OSError as e:
            raise CannotWrite(
                f"cannot write {path} ({e.strerror}): expected a file in a folder that is there and has room for "
                f"{len(content):,} bytes. Nothing half-written is left behind",
                e,
            ) from e

    def _parquet(self) -> bytes:
        arrow, parquet = need_library("pyarrow"), need_library("pyarrow.parquet")
        out = io.BytesIO()
        parquet.write_table(arrow.table({name: _alike(c) for name, c in self.columns.items()}), out)
        return out.getvalue()


def format_of(path: str | os.PathLike[str] | StorePath) -> str:
    """The format that a name ends in.

    >>> format_of("runs/top.parquet"), format_of("top.JSONL")
    ('parquet', 'jsonl')
    """
    suffix = PurePath(str(path)).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise UndeError(
            f"cannot tell a format from {path}: expected a name that ends in .{', .'.join(FORMATS)}"
        )
    return suffix


def check_format(format: str) -> None:
    """Raises for a format there is not, and for one whose library is not here."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if format == "parquet":
        need_library("pyarrow")


def _csv(columns: list[str], rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    line = io.StringIO()
    writer = csv.DictWriter(line, columns)
    writer.writeheader()
    for row in rows:
        joined = {name: " ".join(map(str, v)) if isinstance(v, list) else v for name, v in row.items()}
        writer.writerow({name: cell(value) for name, value in joined.items()})
        yield line.getvalue()
        line.seek(0)
        line.truncate()
    yield line.getvalue()


def _alike(column: Sequence[Any] | np.ndarray) -> Sequence[Any] | np.ndarray:
    """A column of one type: ids that are partly numbers and partly names are all names."""
    if isinstance(column, np.ndarray) or len({type(v) for v in column if v is not None}) <= 1:
        return column
    return [None if v is None else str(v) for v in column]


def need_library(library: str) -> Any:
    """Import a library of the extra `tables`; raises with how to install it."""
    import importlib

    try:
        return importlib.import_module(library)
    except ImportError:
        raise UndeError(f"this needs {library.partition('.')[0]}: pip install 'unde[tables]'") from None
