"""The plain parts of a page: summary cards, tables of results, the steps that were run, and provenance."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unde.console import counted, duration
from unde.errors import UndeError
from unde.markup import Html, el, number


@dataclass(frozen=True)
class Card:
    """A number worth seeing first: what it is, its value as text, and a short remark.

    >>> Card("Training examples", "4,000", "10 % with wrong labels").value
    '4,000'
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ResultTable:
    """A table of results. Text cells are shown as they are, floats with four significant digits.

    `highlight` is the position of the row to look at first.

    >>> table = ResultTable("LDS", ["scores", "LDS"], [["unweighted", "26.1 ± 1.2"], ["weighted", "30.4 ± 1.1"]])
    >>> len(table.rows)
    2
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float | None]]
    note: str = ""
    highlight: int | None = None

    def __post_init__(self) -> None:
        for position, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise UndeError(
                    f"row {position} of the table {self.title!r} has {len(row)} cells: "
                    f"expected one for each of the {len(self.columns)} columns"
                )


@dataclass(frozen=True)
class Step:
    """Something that was run and how long it took.

    >>> Step("build the index", 12.5, "4,000 examples").seconds
    12.5
    """

    name: str
    seconds: float
    note: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise UndeError(f"the step {self.name!r} took {self.seconds} seconds: expected a number ≥ 0")


def cards_list(cards: Sequence[Card]) -> Html | None:
    """The cards as a list of terms, each with its value."""
    if not len(cards):
        return None
    return el(
        "dl",
        {"class": "cards"},
        [
            el(
                "div",
                None,
                el("dt", None, card.label),
                el("dd", {"class": "value"}, card.value),
                el("dd", {"class": "note"}, card.note) if card.note else None,
            )
            for card in cards
        ],
    )


def evaluation_section(tables: Sequence[ResultTable]) -> Html:
    """The section with all result tables."""
    return el(
        "section",
        {"id": "evaluation", "aria-labelledby": "evaluation-title"},
        el("h2", {"id": "evaluation-title"}, "Evaluation"),
        [result_table(table) for table in tables],
    )


def result_table(table: ResultTable) -> Html:
    """One table of results, with its caption and note."""
    numeric = [
        all(_is_numeric(row[column]) for row in table.rows) and bool(table.rows)
        for column in range(len(table.columns))
    ]
    classes = ["number" if is_number else None for is_number in numeric]
    heads = [el("th", {"scope": "col", "class": kind}, head) for head, kind in zip(table.columns, classes)]
    rows = []
    for position, row in enumerate(table.rows):
        cells = [
            el("td" if column else "th", {"class": kind, "scope": None if column else "row"}, _cell(value))
            for column, (value, kind) in enumerate(zip(row, classes))
        ]
        rows.append(el("tr", {"class": "highlight" if position == table.highlight else None}, cells))
    return el(
        "div",
        {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": table.title},
        el(
            "table",
            {"class": "data results"},
            el("caption", None, table.title),
            el("thead", None, el("tr", None, heads)),
            el("tbody", None, rows),
        ),
        el("p", {"class": "note"}, table.note) if table.note else None,
    )


def _is_numeric(value: object) -> bool:
    """Numbers, and text that begins as one ("26.1 ± 1.2", "12 %"), line up on the right."""
    if isinstance(value, bool) or value is None:
        return value is None
    return isinstance(value, (int, float)) or str(value).lstrip("+-−").lstrip()[:1].isdigit()


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value, 4) if isinstance(value, float) else str(value)


def steps_section(steps: Sequence[Step]) -> Html:
    """The section with what was run: a bar for each step's time."""
    longest, total = max(step.seconds for step in steps), sum(step.seconds for step in steps)
    lines = [
        el(
            "li",
            None,
            el("span", {"class": "step-name"}, step.name),
            el("span", {"class": "step-time"}, duration(step.seconds, exact=True)),
            el(
                "span",
                {"class": "bar", "aria-hidden": "true"},
                el("i", {"style": f"width:{100 * step.seconds / longest if longest else 0:.4g}%"}),
            ),
            el("span", {"class": "note"}, step.note) if step.note else None,
        )
        for step in steps
    ]
    return el(
        "section",
        {"id": "steps", "aria-labelledby": "steps-title"},
        el("h2", {"id": "steps-title"}, "What was run"),
        el("p", {"class": "lead"}, f"{counted(len(steps), 'step')} in {duration(total, exact=True)}."),
        el("ol", {"class": "steps"}, lines),
    )


def provenance_section(provenance: Mapping[str, object]) -> Html:
    """The folded section with versions, seeds and commands; nested values are written as JSON."""
    entries = [
        el("div", None, el("dt", None, key), el("dd", None, _provenance_value(value)))
        for key, value in provenance.items()
    ]
    return el(
        "section",
        {"id": "provenance", "aria-labelledby": "provenance-title"},
        el("h2", {"id": "provenance-title"}, "Provenance"),
        el(
            "details",
            {"class": "fold"},
            el("summary", None, "Versions, seeds and settings behind this page"),
            el("dl", {"class": "provenance"}, entries),
        ),
    )


def _provenance_value(value: object) -> Html:
    if isinstance(value, (Mapping, list, tuple)):
        written = json.dumps(value, indent=2, default=str, ensure_ascii=False)
        return el("pre", None, written)
    return el("code", None, str(value))
