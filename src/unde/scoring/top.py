"""The best training examples of queries, as tables, files and in notebooks."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from unde import markup
from unde.console import cell
from unde.data import to_numpy
from unde.errors import UndeError, unknown
from unde.store.files import CannotWrite, write_atomically
from unde.store.remote import StorePath, Unreachable, place

if TYPE_CHECKING:
    import pandas as pd

_PREVIEW = 5  # queries, and examples of each, that a notebook shows


@dataclass(frozen=True, repr=False, eq=False)
class Top:
    """The k best training examples of each query, best first; `scores.top(k)` returns it.

    Of equal scores the earlier example is first.

    Attributes:
        indices: Positions of the training examples, (Q, k); numbers of documents where these were ranked.
        values: Their scores, (Q, k).
        ids: The users' ids of the training examples, or their positions.
        query_ids: Names of the queries, if they have some.
        query_texts: Texts of the queries, if known.
        texts: Texts of the training examples (Q, k), if known.
        trained_on: Returns the positions of the queries that are training examples.

    >>> import torch
    >>> top = Top(torch.tensor([[4, 1]]), torch.tensor([[0.5, 0.25]]), [["row-4", "row-1"]])
    >>> top
    Top(1 query, 2 examples each: 'row-4' (+0.5), 'row-1' (+0.25))
    >>> list(top.table().rows())[1]
    {'query': 0, 'query_id': 0, 'rank': 2, 'index': 1, 'id': 'row-1', 'score': 0.25}
    """

    indices: Tensor
    values: Tensor
    ids: list[list[Any]]
    query_ids: Sequence[Any] | None = None
    query_texts: Sequence[str | None] | None = None
    texts: Sequence[Sequence[str | None]] | None = None
    trained_on: Callable[[], list[int]] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def table(self) -> Table:
        """A table with a row for each query and rank.

        Returns:
            Columns query (its number), query_id, rank (from 1), index, id, score; query_text and text where known.
        """
        queries, k = self.indices.shape
        number, rank = np.repeat(np.arange(queries), k), np.tile(np.arange(1, k + 1), queries)
        columns: dict[str, Sequence[Any] | np.ndarray] = {
            "query": number,
            "query_id": number if self.query_ids is None else _repeat(self.query_ids, k),
            "rank": rank,
            "index": to_numpy(self.indices).reshape(-1),
            "id": [name for row in self.ids for name in row],
            "score": to_numpy(self.values).reshape(-1),
        }
        if self.query_texts is not None:
            columns["query_text"] = _repeat(self.query_texts, k)
        if self.texts is not None:
            columns["text"] = [text for row in self.texts for text in row]
        return Table(columns)

    def to_pandas(self) -> pd.DataFrame:
        """The table as a DataFrame."""
        return self.table().to_pandas()

    def to_parquet(self, path: str | os.PathLike[str] | StorePath) -> None:
        """Write the table as Parquet."""
        self.table().save(path, "parquet")

    def to_csv(self, path: str | os.PathLike[str] | StorePath) -> None:
        """Write the table as CSV; cells that a spreadsheet would run as formulas get an apostrophe in front."""
        self.table().save(path, "csv")

    def to_jsonl(self, path: str | os.PathLike[str] | StorePath) -> None:
        """Write the table as JSON Lines."""
        self.table().save(path, "jsonl")

    def __repr__(self) -> str:
        queries, k = self.indices.shape
        first = ", ".join(f"{i!r} ({v:+.3g})" for i, v in zip(self.ids[0][:3], self.values[0].tolist()))
        more = ", …" if k > 3 or queries > 1 else ""
        count = "1 query" if queries == 1 else f"{queries:,} queries"
        return f"Top({count}, {k} example{'s' if k > 1 else ''} each: {first}{more})"

    def _repr_html_(self) -> str:
        queries, k = self.indices.shape
        largest = float(self.values.abs().max())
        rows = [
            [
                (q if self.query_ids is None else self.query_ids[q]) if rank == 0 else "",
                rank + 1,
                self.ids[q][rank],
                markup.bar(float(self.values[q, rank]), largest),
                *([] if self.texts is None else [markup.brief(self.texts[q][rank] or "")]),
            ]
            for q in range(min(_PREVIEW, queries))
            for rank in range(min(_PREVIEW, k))
        ]
        note = f"the first {_PREVIEW} of each are shown" if max(queries, k) > _PREVIEW else ""
        head = ["query", "rank", "id", "score", *([] if self.texts is None else ["text"])]
        return markup.table(f"Top {k} of {queries:,} queries", head, rows, note)


def _repeat(values: Sequence[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]


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
