"""Training examples that somebody has marked, and the list of them for other programs."""

from __future__ import annotations

import threading
from typing import Any

from unde.errors import UndeError, unknown
from unde.scoring.table import Table
from unde.ui.explorer.catalogue import Catalogue

KINDS = {"label": "wrong label", "duplicate": "duplicate", "remove": "remove"}
COLUMNS = ["index", "id", "mark", "label", "text"]
FORMATS = {"csv": "text/csv; charset=utf-8", "jsonl": "application/x-ndjson"}


class Marks:
    """Example → mark, for all tabs; `version` grows with each change."""

    def __init__(self, train: Catalogue) -> None:
        self.train, self.version = train, 0
        self._of: dict[int, str] = {}
        self._lock = threading.Lock()

    def put(self, at: int, kind: Any) -> None:
        """Mark a training example, or take its mark away (None)."""
        self.train.check(at)
        if kind is not None and kind not in tuple(KINDS):
            raise unknown("mark", str(kind)[:40], KINDS)
        with self._lock:
            if kind is None:
                self._of.pop(at, None)
            else:
                self._of[at] = kind
            self.version += 1

    def all(self) -> dict[int, str]:
        with self._lock:
            return dict(sorted(self._of.items()))

    def listed(self) -> list[dict[str, Any]]:
        """A row for each marked example."""
        rows = []
        for at, kind in self.all().items():
            name, label, text = self.train.name(at), self.train.label(at), self.train.text(at)
            rows.append(dict(zip(COLUMNS, (at, name, KINDS[kind], label, text))))
        return rows

    def export(self, format: str) -> bytes:
        """The list as CSV or as JSON lines."""
        if format not in FORMATS:
            raise unknown("format", format, FORMATS)
        rows = self.listed()
        if not rows:
            raise UndeError("no example is marked: open one and say what is wrong with it")
        return Table({name: [row[name] for row in rows] for name in COLUMNS}).content(format)
