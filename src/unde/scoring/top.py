"""The best training examples of queries: a stable top-k, and how two of them merge."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unde import notebook
from unde.data import to_numpy
from unde.errors import UndeError
from unde.scoring.table import Table
from unde.store.remote import StorePath

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 5  # queries, and examples of each, that a notebook shows


@dataclass(frozen=True, repr=False, eq=False)
class Top:
    """The k best training examples of each query, best first; of equal scores the earlier example first.

    >>> top = Top(torch.tensor([[4, 1]]), torch.tensor([[0.5, 0.25]]), [["row-4", "row-1"]])
    >>> top
    Top(1 query, 2 examples each: 'row-4' (+0.5), 'row-1' (+0.25))
    >>> list(top.table().rows())[1]
    {'query': 0, 'query_id': 0, 'rank': 2, 'index': 1, 'id': 'row-1', 'score': 0.25}
    """

    indices: Tensor  # (Q, k), numbers of documents where these were ranked
    values: Tensor  # (Q, k)
    ids: list[list[Any]]  # (Q, k), the user's ids if the index has them
    query_ids: Sequence[Any] | None = None  # what the queries are called, if they have names
    query_texts: Sequence[str | None] | None = None
    texts: Sequence[Sequence[str | None]] | None = None  # (Q, k)
    trained_on: Callable[[], list[int]] | None = None  # which of the queries are training examples, if known

    def __len__(self) -> int:
        return len(self.indices)

    def table(self) -> Table:
        """A row for each query and rank: query (its number), query_id, rank (from 1), index, id, score; and query_text
        and text where they are known."""
        queries, k = self.indices.shape
        number, rank = np.repeat(np.arange(queries), k), np.tile(np.arange(1, k + 1), queries)
        columns: dict[str, Sequence[Any] | np.ndarray] = {
            "query": number,
            "query_id": number if self.query_ids is None else _repeated(self.query_ids, k),
            "rank": rank,
            "index": to_numpy(self.indices).reshape(-1),
            "id": [name for row in self.ids for name in row],
            "score": to_numpy(self.values).reshape(-1),
        }
        if self.query_texts is not None:
            columns["query_text"] = _repeated(self.query_texts, k)
        if self.texts is not None:
            columns["text"] = [text for row in self.texts for text in row]
        return Table(columns)

    def to_pandas(self) -> pd.DataFrame:
        """The table as a DataFrame."""
        return self.table().to_pandas()

    def to_parquet(self, path: str | os.PathLike[str] | StorePath) -> None:
        self.table().save(path, "parquet")

    def to_csv(self, path: str | os.PathLike[str] | StorePath) -> None:
        """What a spreadsheet would run as a formula gets an apostrophe in front."""
        self.table().save(path, "csv")

    def to_jsonl(self, path: str | os.PathLike[str] | StorePath) -> None:
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
                notebook.bar(float(self.values[q, rank]), largest),
                *([] if self.texts is None else [notebook.brief(self.texts[q][rank] or "")]),
            ]
            for q in range(min(_SHOWN, queries))
            for rank in range(min(_SHOWN, k))
        ]
        shown = f"the first {_SHOWN} of each are shown" if max(queries, k) > _SHOWN else ""
        head = ["query", "rank", "id", "score", *([] if self.texts is None else ["text"])]
        return notebook.table(f"Top {k} of {queries:,} queries", head, rows, shown)


def _repeated(values: Sequence[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]


class Best:
    """The k best so far, of scores that come in blocks of training examples, in order, from the `first` on.

    Once there are k, only scores that are better than the last of them are looked at. Those are few; they wait until
    there are enough of them to be worth a merge.
    """

    def __init__(self, queries: int, k: int, largest: bool, first: int = 0) -> None:
        self.k, self.largest, self.first = k, largest, first
        self.worst = -torch.inf if largest else torch.inf
        self._values, self._indices = torch.empty(queries, k), torch.empty(queries, k, dtype=torch.long)
        self._waiting: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}  # by queries

    @property
    def values(self) -> Tensor:
        """(Q, k)"""
        self._settle()
        return self._values

    @property
    def indices(self) -> Tensor:
        """(Q, k)"""
        self._settle()
        return self._indices

    def see(self, queries: slice, start: int, scores: Tensor) -> None:
        """Scores (q, n) of the training examples from `start` on."""
        if start - self.first < self.k:
            best, at = stable_top(scores, min(self.k, scores.shape[1]), self.largest)
            self.merge(queries, start, scores.shape[1], best, at + start)
            return
        key = (queries.start, queries.stop)
        if self._waiting and key not in self._waiting:
            self._settle()  # queries were cut in another way
        last = self._values[queries, -1:]
        q, n = ((scores > last) if self.largest else (scores < last)).nonzero(as_tuple=True)
        if not len(q):
            return
        count = torch.bincount(q, minlength=len(scores))
        place = torch.arange(len(q)) - (count.cumsum(0) - count)[q]  # those of a query one after the other
        shape = (len(scores), int(count.max()))
        values, indices = torch.full(shape, self.worst), torch.zeros(shape, dtype=torch.long)
        values[q, place], indices[q, place] = scores[q, n], n + start
        waiting = self._waiting.setdefault(key, [])
        waiting.append((values, indices))
        if sum(v.shape[1] for v, _ in waiting) >= self.k:
            self._settle(key)

    def merge(self, queries: slice, start: int, count: int, values: Tensor, indices: Tensor) -> None:
        """The best of `count` training examples from `start` on, which follow those seen so far."""
        self._settle()
        have, keep = min(self.k, start - self.first), min(self.k, start - self.first + count)
        best = torch.cat([self._values[queries, :have], values], 1)
        number = torch.cat([self._indices[queries, :have], indices], 1)
        self._values[queries, :keep], at = stable_top(best, keep, self.largest)
        self._indices[queries, :keep] = number.gather(1, at)

    def _settle(self, *keys: tuple[int, int]) -> None:
        """What waits is merged: of all queries, or of some."""
        for key in keys or list(self._waiting):
            queries, waiting = slice(*key), self._waiting.pop(key)
            best = torch.cat([self._values[queries], *(v for v, _ in waiting)], 1)
            number = torch.cat([self._indices[queries], *(i for _, i in waiting)], 1)
            self._values[queries], at = stable_top(best, self.k, self.largest)
            self._indices[queries] = number.gather(1, at)

    def top(self, ids: Sequence[Any] | None) -> Top:
        named = self.indices.tolist()
        if ids is not None:
            named = [[ids[i] for i in row] for row in named]
        return Top(self.indices, self.values, named)


def stable_top(values: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """As topk, but of equal values the earlier ones, in their order.

    >>> stable_top(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), 2, largest=True)[1]
    tensor([[1, 2]])
    """
    best, at = values.topk(k, largest=largest)
    last = best[:, -1:]
    equal = (best[:, 1:] == best[:, :-1]).any(1)
    equal |= ((values >= last) if largest else (values <= last)).sum(1) > k
    tied = equal.nonzero()[:, 0]  # rows where topk chose among equals, or put them in some order
    if len(tied):
        found = values[tied].sort(stable=True, dim=1, descending=largest)
        best[tied], at[tied] = found.values[:, :k], found.indices[:, :k]
    return best, at


def check_k(k: int, usable: int, left_out: int = 0, what: str = "training examples") -> None:
    if not 1 <= k <= usable:
        also = f" ({left_out} more were skipped)" if left_out else ""
        raise UndeError(f"top({k}) of {usable} {what}{also}: expected 1 ≤ k ≤ {usable}")
