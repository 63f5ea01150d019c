"""The best training examples of queries, as tables, files and in notebooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from unde import markup
from unde.data import to_numpy
from unde.scoring.table import Table
from unde.store.remote import StorePath

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
