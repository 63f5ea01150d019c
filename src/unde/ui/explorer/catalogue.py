"""Examples as the page knows them: what each is called, how it is shown, its label and its text; and filters."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unde.data import Rows
from unde.errors import UndeError, unknown
from unde.markup import join
from unde.scoring.top import Table
from unde.setup import Setup
from unde.tasks import Classification, Diffusion
from unde.ui.explorer.jobs import BackgroundJob, Unanswered
from unde.ui.report.example_view import (
    as_item,
    class_name,
    class_names,
    class_number,
    label_of,
    show_diffusion,
    true_numbers,
)
from unde.ui.report.items import MISLABELLED, Item, ScoredItem, example, kind_of, label_text, passage, picture

SAMPLED = 8  # examples that tell how all are laid out
HELD = 4096  # rendered examples
TOLD = 500  # examples between two words about how far it is
_SHOWING = threading.RLock()  # what shows an example may run a model, the same one for all catalogues


class Catalogue:
    """Training examples, or queries, by position."""

    def __init__(
        self,
        rows: Rows,
        setup: Setup,
        names: Sequence[Any] | None = None,
        questions: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """`questions` ask about the examples, where these are queries of several kinds."""
        self.rows, self.setup, self.names, self.questions = rows, setup, names, questions
        self.classes = class_names(setup)
        self._true: Any = None
        self._known: dict[str, list[str]] = {}  # texts and labels, once they are read
        self.item = lru_cache(256)(self._item)
        self.html = lru_cache(HELD)(self._html)
        self.kind = kind_of(self.item(i) for i in range(min(SAMPLED, len(rows))))

    def __len__(self) -> int:
        return len(self.rows)

    def check(self, at: Any) -> int:
        """A position, if it is one."""
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < len(self):
            raise UndeError(f"no example {str(at)[:40]!r}: expected a position from 0 to {len(self) - 1}")
        return at

    def name(self, at: int) -> int | str:
        if self.names is None:
            return at
        name = self.names[at]
        return name if isinstance(name, (int, str)) else str(name)

    def find(self, name: str) -> int:
        """The position of an example that is named by its id, or by its position."""
        name = name.strip()
        if self.names is not None and name in (known := [str(n) for n in self.names]):
            return known.index(name)
        number = name.removeprefix("#")
        if number.isascii() and number.isdigit() and len(number) < 16 and int(number) < len(self):
            return int(number)
        ids = "an id, or " if self.names is not None else ""
        raise UndeError(
            f"no training example {name[:60]!r}: expected {ids}a position from 0 to {len(self) - 1}"
        )

    def _item(self, at: int) -> Item:
        with _SHOWING:
            row = self.rows[at]
            item = as_example(self.setup, row, self.name(at), self.classes)
            if item.label is not None and self._true is None:
                return item
            number = class_number(self.setup.task, self.rows, at)
            if item.label is None:
                item = replace(item, label=class_name(number, self.classes))
            if self._true is None or int(self._true[at]) == number:
                return item
            return replace(item, true_label=class_name(int(self._true[at]), self.classes), mislabelled=True)

    def load_true_labels(self) -> None:
        """These are the training examples: what their labels should be is known where the setup tells it."""
        if isinstance(self.setup.task, Classification):
            self._true = true_numbers(self.setup, self.classes, len(self))
            self.item.cache_clear()
            self.html.cache_clear()

    def _html(self, at: int) -> str:
        """The example as an entry of a list, by the report's own renderer; the page fills in its score."""
        item = self.item(at)
        return example(ScoredItem(item, 0.0), self.kind, 0.0, [MISLABELLED] if item.is_mislabelled else [])

    def entry(self, at: int) -> dict[str, Any]:
        item = self.item(self.check(at))
        return {
            "at": at,
            "name": item.name,
            "label": None if item.label is None else label_text(item.label),
            "html": self.html(at),
            "question": None if self.questions is None else self.questions[at],
        }

    def whole(self, at: int) -> str:
        """The example at its largest: picture and text."""
        return figure(self.item(self.check(at)), "training example")

    # --- what filters look at ---------------------------------------------------------------------------

    def label(self, at: int) -> str | None:
        found = label_of(self.rows[at])
        if found is None or self.setup.show is not None:
            found = self.item(at).label
        return None if found is None else label_text(class_name(found, self.classes))

    def text(self, at: int) -> str | None:
        row = self.rows[at]
        if isinstance(row, Mapping) and isinstance(row.get("text"), str):
            return row["text"]  # of a picture, its prompt: without drawing it
        if self.kind == "image" and self.setup.show is None:
            return None
        item = self.item(at)
        return item.text if item.text is not None else item.prompt

    def read(self, what: str, job: BackgroundJob) -> None:
        """All texts or labels, once."""
        find, found = self.text if what == "texts" else self.label, []
        for at in range(len(self)):
            if at % TOLD == 0:
                job.tell(f"reading {what}", at, len(self))
            found.append(find(at) or "")
        self._known[what] = [text.casefold() for text in found] if what == "texts" else found

    def matching(self, asked: Mapping[str, Any]) -> Tensor | None:
        """(N,) bool: the examples that pass all filters; None without any."""
        mask: Tensor | None = None
        for kind, value in asked.items():
            if value in (None, ""):
                continue
            if not isinstance(value, str) or len(value) > 1000:
                raise UndeError(f"cannot filter by {str(value)[:40]!r}: expected a text")
            found = torch.tensor(self._passing(kind, value), dtype=torch.bool)
            mask = found if mask is None else mask & found
        return mask

    def _passing(self, kind: str, value: str) -> list[bool]:
        if kind == "id":
            wanted = [part.strip() for part in value.split(",") if part.strip()]
            exact = {w.removeprefix("#") for w in wanted}
            if self.names is None:
                return [str(n) in exact for n in range(len(self))]
            return [str(n) in exact or any(w in str(n) for w in wanted) for n in self.names]
        if kind not in ("label", "text"):
            raise UndeError(f"no filter {kind[:40]!r}: expected label, id or text")
        if f"{kind}s" not in self._known:
            raise Unanswered(f"the {kind}s are not read yet", 409, read=f"{kind}s")
        known = self._known[f"{kind}s"]
        return (
            [value == label for label in known] if kind == "label" else [value.casefold() in t for t in known]
        )


def as_example(setup: Setup, row: Any, name: int | str, classes: Sequence[str] | None = None) -> Item:
    """How an example is shown, with the name of its class where classes have names."""
    show = setup.show or (show_diffusion(setup.task) if isinstance(setup.task, Diffusion) else None)
    with _SHOWING:
        return as_item(row, name, show, classes)


def figure(item: Item, role: str) -> str:
    """An example at its largest."""
    image = picture(item, role) if item.image is not None else None
    prompt = passage(item.prompt or "(empty)") if item.prompt is not None else None
    return join([image, prompt, passage(item.text) if item.text is not None else None])


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

    def rows(self) -> list[dict[str, Any]]:
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
        rows = self.rows()
        if not rows:
            raise UndeError("no example is marked: open one and say what is wrong with it")
        return Table({name: [row[name] for row in rows] for name in COLUMNS}).content(format)
