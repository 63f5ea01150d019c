"""Plain parts of a page: summary cards, tables of results, heat maps, steps and provenance."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unde.console import counted, duration
from unde.data import to_numpy
from unde.errors import UndeError
from unde.evaluate.sources import SourceShares, describe_sources
from unde.markup import Child, Html, el, number


def section(name: str, title: str, *children: Child) -> Html:
    """A section of a page with its heading; `name` is its anchor."""
    heading = el("h2", title, id=f"{name}-title")
    return el("section", heading, *children, id=name, aria_labelledby=f"{name}-title")


def note(words: str) -> Html | None:
    """A remark in small print; None without words."""
    return el("p.note", words) if words else None


def lead(*children: Child) -> Html:
    """An introductory paragraph."""
    return el("p.lead", *children)


def fold(summary: str, *children: Child) -> Html:
    """Content that opens on demand."""
    return el("details.fold", el("summary", summary), *children)


def scroll(label: str, *children: Child, name: str = "div") -> Html:
    """A region that scrolls sideways where it is too wide, also by keyboard."""
    return el(f"{name}.scroll", *children, tabindex="0", role="region", aria_label=label)


def legend(entries: Sequence[Child]) -> Html | None:
    """The marks of a section with their meanings; None without any."""
    return el("ul.legend", [el("li", entry) for entry in entries], aria_label="marks") if entries else None


def bar(share: float, tone: str = "") -> Html:
    """A horizontal bar, `share` of the width of its place."""
    length = el("i", style=f"width:{100 * share:.4g}%")
    return el(f"span.bar.{tone}", length, aria_hidden="true")


def table(heads: Child, rows: Child, caption: str = "", kind: str = "data") -> Html:
    """A table of head cells and of rows (`tr`)."""
    title = el("caption", caption) if caption else None
    return el(f"table.{kind}", title, el("thead", el("tr", heads)), el("tbody", rows))


def terms(kind: str, rows: Iterable[tuple[Child, Child]]) -> Html:
    """A list of terms with their values."""
    return el(f"dl.{kind}", [el("div", el("dt", t), el("dd", v, dir="auto")) for t, v in rows])


@dataclass(frozen=True)
class Card:
    """A headline number: label, value as text, and a short remark.

    >>> Card("Training examples", "4,000", "10 % with wrong labels").value
    '4,000'
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ResultTable:
    """A table of results. Text cells are unchanged, floats get four significant digits.

    `highlight` is the position of the row to emphasise.

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
    """A step of a run and its duration.

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
        "dl.cards",
        [
            el(
                "div",
                el("dt", card.label),
                el("dd.value", card.value),
                el("dd.note", card.note) if card.note else None,
            )
            for card in cards
        ],
    )


def evaluation_section(tables: Sequence[ResultTable]) -> Html:
    """The section with all result tables."""
    return section("evaluation", "Evaluation", [result_table(each) for each in tables])


def result_table(result: ResultTable) -> Html:
    """A table of results with its caption and note. Columns of numbers are aligned to the right."""
    kinds = [
        "number" if result.rows and all(_is_numeric(row[column]) for row in result.rows) else ""
        for column in range(len(result.columns))
    ]
    heads = [el(f"th.{kind}", head, scope="col") for head, kind in zip(result.columns, kinds)]
    rows = []
    for position, row in enumerate(result.rows):
        cells = [
            el(f"td.{kind}" if column else f"th.{kind}", _cell(value), scope=None if column else "row")
            for column, (value, kind) in enumerate(zip(row, kinds))
        ]
        rows.append(el("tr.highlight" if position == result.highlight else "tr", cells))
    return scroll(result.title, table(heads, rows, result.title, "data results"), note(result.note))


def _is_numeric(value: object) -> bool:
    """Whether a cell is a number, or text that begins with one ("26.1 ± 1.2", "12 %")."""
    if isinstance(value, bool) or value is None:
        return value is None
    return isinstance(value, (int, float)) or str(value).lstrip("+-−").lstrip()[:1].isdigit()


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value, 4) if isinstance(value, float) else value if isinstance(value, str) else str(value)


def steps_section(steps: Sequence[Step]) -> Html:
    """The section with a bar for the time of each step."""
    longest, total = max(step.seconds for step in steps), sum(step.seconds for step in steps)
    lines = [
        el(
            "li",
            el("span.step-name", step.name),
            el("span.step-time", duration(step.seconds, exact=True)),
            bar(step.seconds / longest if longest else 0),
            el("span.note", step.note) if step.note else None,
        )
        for step in steps
    ]
    return section(
        "steps",
        "What was run",
        lead(f"{counted(len(steps), 'step')} in {duration(total, exact=True)}."),
        el("ol.steps", lines),
    )


def provenance_section(provenance: Mapping[str, object]) -> Html:
    """The folded section with versions, seeds and commands; nested values are written as JSON."""
    entries = [(key, _provenance_value(value)) for key, value in provenance.items()]
    settings = fold("Versions, seeds and settings behind this page", terms("provenance", entries))
    return section("provenance", "Provenance", settings)


def _provenance_value(value: object) -> Html:
    if isinstance(value, (Mapping, list, tuple)):
        return el("pre", json.dumps(value, indent=2, default=str, ensure_ascii=False))
    return el("code", str(value))


_ROWS = 40


@dataclass(frozen=True, eq=False)
class SourcesPanel:
    """Shares of influence by a column, over the queries of a page."""

    column: str
    shares: SourceShares
    queries: int


def sources_section(panel: SourcesPanel) -> Html:
    """The section with a bar for each source."""
    shares, lines = panel.shares, describe_sources(panel.shares)
    largest = max((e.mean for e in shares.shares), default=0.0) or 1.0
    heads = [
        el("th", head, scope="col")
        for head in (panel.column, "share of influence", "", "of examples", "total")
    ]
    rows = [
        el(
            "tr",
            el("th", name, scope="row"),
            el("td.meter", bar(estimate.mean / largest, "pro")),
            el("td", share),
            el("td", base),
            el("td", total),
        )
        for (name, share, base, total), estimate in list(zip(lines, shares.shares))[:_ROWS]
    ]
    more = f"{len(lines) - _ROWS:,} more sources are not shown. " if len(lines) > _ROWS else ""
    return section(
        "sources",
        f"Influence by {panel.column}",
        lead(
            f"The share of each {panel.column} in the positive scores of a query, and its summed scores: means over "
            f"{panel.queries:,} queries, ± half of the 95 % interval over queries. Beside it its share of the training "
            "examples, which is what chance would give."
        ),
        scroll(f"influence by {panel.column}", table(heads, rows, kind="data results")),
        note(more),
    )


# --- heat maps: shares by row and column, several side by side under one colour scale -----------------------

HEATS = 10  # shades: .heat-0 … .heat-9 in the style
_TOPS = (0.01, 0.02, 0.05, *(t / 10 for t in range(1, 11)))  # round ends of the scale


@dataclass(frozen=True, eq=False)
class HeatmapPanel:
    """Values in [0, 1] by row and column, one map for each name; NaN where there is no such cell.

    `measure` names the values.

    >>> maps = {"style": [[0.5, 0.1], [0.2, float("nan")]], "subject": [[0.1, 0.3], [0.4, float("nan")]]}
    >>> panel = HeatmapPanel("Recall@10", ["down", "up"], ["q", "k"], maps, measure="recall@10")
    >>> panel.top
    0.5
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    maps: Mapping[str, object]  # (rows, columns) each
    measure: str = ""

    def __post_init__(self) -> None:
        shape = (len(self.rows), len(self.columns))
        if not all(shape) or not self.maps:
            raise UndeError(
                f"the heat map {self.title!r} has {shape[0]} rows, {shape[1]} columns and {len(self.maps)} maps: "
                "expected at least one of each"
            )
        maps = {name: to_numpy(values).astype(np.float64) for name, values in self.maps.items()}
        for name, values in maps.items():
            if values.shape != shape:
                raise UndeError(
                    f"the map {name!r} of {self.title!r} has the shape {values.shape}: expected {shape}, a value for "
                    "each row and column (NaN where there is no such cell)"
                )
            bad = np.argwhere(~np.isnan(values) & ~((values >= 0) & (values <= 1)))
            if len(bad):
                r, c = bad[0]
                raise UndeError(
                    f"the map {name!r} of {self.title!r} has {values[r, c]:.6g} at {self.rows[r]!r}, "
                    f"{self.columns[c]!r}: expected shares from 0 to 1 (divide per cents by 100), or NaN for no cell"
                )
        object.__setattr__(self, "maps", maps)

    @property
    def top(self) -> float:
        """The end of the shared colour scale: the first round number that no value exceeds."""
        known = [v[~np.isnan(v)].max() for v in map(np.asarray, self.maps.values()) if not np.isnan(v).all()]
        return next(t for t in _TOPS if t >= max(known, default=1.0))


def heatmaps_section(panels: Sequence[HeatmapPanel]) -> Html:
    """The section with all heat maps."""
    return section("heatmaps", "Heat maps", [_heatmap(panel) for panel in panels])


def _heatmap(panel: HeatmapPanel) -> Html:
    return el(
        "div.heat-panel",
        el("h3", panel.title),
        _heat_scale(panel),
        el("div.maps", [_heat_table(panel, name) for name in panel.maps]),
    )


def _heat_scale(panel: HeatmapPanel) -> Html:
    shades = [el(f"i.heat-{level}") for level in range(HEATS)]
    return el(
        "p.note.heat-scale",
        f"{panel.measure or 'share'} in %: 0 ",
        el("span.shades", shades, aria_hidden="true"),
        f" {number(100 * panel.top)}",
    )


def _heat_table(panel: HeatmapPanel, name: str) -> Html:
    values = np.asarray(panel.maps[name])
    if np.isnan(values).all():
        best = "no cell"
    else:
        r, c = map(int, np.unravel_index(np.nanargmax(values), values.shape))
        best = f"highest {number(100 * values[r, c])} % at {panel.rows[r]}, {panel.columns[c]}"
    heads = [el("td"), [el("th", column, scope="col") for column in panel.columns]]
    rows = [
        el(
            "tr",
            el("th", row, scope="row"),
            [_heat_cell(v, f"{row}, {c}", panel.top) for v, c in zip(line, panel.columns)],
        )
        for row, line in zip(panel.rows, values)
    ]
    return scroll(
        f"heat map of {panel.measure or panel.title} for {name}: {best}",
        table(heads, rows, name, "heat"),
        el("figcaption", best[0].upper() + best[1:]),
        name="figure",
    )


def _heat_cell(value: float, name: str, top: float) -> Html:
    if np.isnan(value):
        return el("td", "–", title=f"{name}: none")
    level, share = min(HEATS - 1, int(HEATS * value / top)), f"{100 * value:.{0 if top > 0.1 else 1}f}"
    tone = "cool" if level < HEATS // 2 else "hot"
    return el(f"td.heat-{level}.{tone}", share, title=f"{name}: {number(100 * value)} %")
