"""Queries that are in the training data, beside what influenced them: a table and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unde.console import counted
from unde.data import Rows
from unde.evaluate.overlap import EXACT, NEAR, SPAN, Overlap
from unde.index import Index
from unde.scoring import GroupScores, Table
from unde.setup import Setup
from unde.ui.report.example_view import ExampleView
from unde.ui.report.items import ScoredItem
from unde.ui.report.page import Page, meaning
from unde.ui.report.queries import QueryPanel, Row
from unde.ui.report.tables import Card, ResultTable
from unde.version import __version__

_ROWS = 200  # of the table on the page
_COLUMNS = {
    "query": "query_id", "overlap": "kind", "share": "share", "words": "words", "training example": "id",
    "rank by influence": "rank", "passage": "passage",
}  # fmt: skip


@dataclass(frozen=True)
class LeakReview:
    """Overlaps of queries with training examples, and the scores of both."""

    index: Index
    setup: Setup
    queries: Rows
    scores: GroupScores
    overlaps: Sequence[Overlap]
    names: Sequence[Any]

    @cached_property
    def leaked(self) -> dict[int, list[Overlap]]:
        """Overlaps by query."""
        out: dict[int, list[Overlap]] = {}
        for overlap in self.overlaps:
            out.setdefault(overlap.query, []).append(overlap)
        return out

    def count(self, kind: str) -> int:
        """Queries whose closest overlap is of this kind."""
        return sum(self.kind(q) == kind for q in self.leaked)

    def kind(self, query: int) -> str:
        kinds = {overlap.kind for overlap in self.leaked[query]}
        return next(kind for kind in (EXACT, NEAR, SPAN) if kind in kinds)

    @property
    def summary(self) -> str:
        """How many queries overlap with the training data, in a sentence."""
        parts = [counted(self.count(kind), kind) for kind in (EXACT, NEAR, SPAN) if self.count(kind)]
        if not parts:
            return f"None of {len(self.queries):,} queries overlaps with the training data."
        overlap = f"{len(self.leaked):,} of {len(self.queries):,} queries overlap with the training data"
        return f"{overlap}: {', '.join(parts)}."

    @cached_property
    def totals(self) -> dict[int, Tensor]:
        """(N,) scores of each query with overlaps."""
        return {q: self.scores.select(torch.tensor([q])).total()[0] for q in self.leaked}

    @cached_property
    def table(self) -> Table:
        """A row for each overlap, with the score and the rank of the training example among all of them."""
        ids = range(len(self.index)) if self.index.ids is None else self.index.ids
        rows = []
        for o in self.overlaps:
            score = self.totals[o.query][o.example]
            rank = 1 + int((self.totals[o.query] > score).sum())
            text = (o.kind, round(o.share, 4), o.words, o.passage)
            rows.append((o.query, self.names[o.query], *text, o.example, ids[o.example], float(score), rank))
        columns = ["query", "query_id", "kind", "share", "words", "passage", "index", "id", "score", "rank"]
        return Table({name: [row[c] for row in rows] for c, name in enumerate(columns)})

    def lines(self, count: int, passages: bool = False) -> tuple[list[str], list[list[Any]]]:
        """Heads and cells of the first rows of the table for readers; words and passages are those of texts."""
        texts = any(o.words for o in self.overlaps)
        without = {"words", "passage"} if not texts else set() if passages else {"passage"}
        columns = {head: name for head, name in _COLUMNS.items() if name not in without}
        cells = [
            {**row, "share": f"{row['share']:.0%}", "passage": row["passage"][:120]}
            for row, _ in zip(self.table.rows(), range(count))
        ]
        return list(columns), [[str(row[name]) for name in columns.values()] for row in cells]

    def page(self, title: str, first: int, top: int = 5) -> Page:
        """The first queries with their overlaps and their strongest proponents."""
        view = ExampleView(self.setup)
        panels = []
        for q in list(self.leaked)[:first]:
            best = self.totals[q].topk(min(top, len(self.index)))
            found = [ScoredItem(view.example(o.example), o.share) for o in self.leaked[q]]
            strongest = [
                ScoredItem(view.example(i), v) for i, v in zip(best.indices.tolist(), best.values.tolist())
            ]
            same = len({o.example for o in self.leaked[q]} & set(best.indices.tolist()))
            rows = [
                Row("overlaps", found, note=self._describe(q)),
                Row("by influence", strongest, note=f"{same} of these are among the overlaps"),
            ]
            panels.append(QueryPanel(view.query(self.queries, q, self.names[q]), rows))
        head, lines = self.lines(_ROWS, passages=True)
        note = "Share: of a text the runs of 5 words that the training example holds too; of an image the correlation."
        return Page(
            title,
            f"{len(self.queries):,} queries, {len(self.index):,} training examples, {self.scores.method.name} scores",
            cards=[
                Card("Queries that overlap", f"{len(self.leaked):,}", f"of {len(self.queries):,}"),
                *(Card(f"{kind.capitalize()}s", f"{self.count(kind):,}") for kind in (EXACT, NEAR, SPAN)),
            ],
            queries=panels,
            tables=[ResultTable("Overlaps", head, lines, note)] if lines else (),
            meaning=meaning(self.scores.method, self.setup.task),
            warnings=[self.summary],
            provenance={"unde": __version__, "index": str(self.index.folder)},
        )

    def _describe(self, q: int) -> str:
        closest = self.leaked[q][0]
        run = f", {closest.words} words in a row: “{closest.passage[:160]}”" if closest.words else ""
        return f"{closest.kind}{run}"
