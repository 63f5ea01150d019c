"""Queries and the training examples behind them: a panel for each query, a row for each way of scoring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whence.errors import WhenceError
from whence.report.html import Html, count, el
from whence.report.items import (
    DIFFERS,
    MISLABELLED,
    Item,
    Scored,
    example,
    kind_of,
    label_text,
    largest_score,
    mark,
    passage,
    picture,
    same,
)
from whence.report.tokens import key

RIGHT = mark("right", "✓", "right", "the prediction equals the true label")
WRONG = mark("wrong", "✗", "wrong", "the prediction differs from the true label")


@dataclass(frozen=True, eq=False)
class Row:
    """What one way of scoring found for a query: the highest scores first, the lowest first.

    >>> row = Row("unweighted", [Scored(Item(3), 0.9)], [Scored(Item(8), -0.4)])
    >>> row.name, len(row.opponents)
    ('unweighted', 1)
    """

    name: str
    proponents: Sequence[Scored]
    opponents: Sequence[Scored] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if not len(self.proponents) and not len(self.opponents):
            raise WhenceError(
                f"the row {self.name!r} holds no example: expected proponents, opponents or both"
            )


@dataclass(frozen=True, eq=False)
class QueryPanel:
    """A query, what the model made of it, and its rows, in the order they are read (unweighted first).

    `query.label` is the true label; `predicted` is the model's answer, if it gives one.

    >>> row = Row("weighted", [Scored(Item(3, label=7), 0.9)])
    >>> QueryPanel(Item("q0", label=7), [row], predicted=7).is_right
    True
    """

    query: Item
    rows: Sequence[Row]
    predicted: int | str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise WhenceError(f"the query {self.query.id!r} has no row of examples: expected at least one")

    @property
    def is_right(self) -> bool | None:
        """Whether the prediction equals the true label; None where one of them is not known."""
        if self.predicted is None or self.query.label is None:
            return None
        return same(self.predicted, self.query.label)

    @property
    def kind(self) -> str:
        """How the panel is laid out: as "text", "image" or "id", after the training examples in it."""
        return "text" if self.shaded else kind_of(scored.item for scored in self._scored())

    @property
    def shaded(self) -> bool:
        """Whether some example shows what its tokens add to the score."""
        return any(scored.tokens is not None for scored in self._scored())

    def _scored(self) -> Iterator[Scored]:
        for row in self.rows:
            yield from row.proponents
            yield from row.opponents


def queries_section(panels: Sequence[QueryPanel]) -> Html:
    """The section with all query panels, behind a strip of links to them."""
    return el(
        "section",
        {"id": "queries", "aria-labelledby": "queries-title"},
        el("h2", {"id": "queries-title"}, "Queries and the examples behind them"),
        _legend(panels),
        _contents(panels) if len(panels) > 2 else None,
        [_panel(panel, position) for position, panel in enumerate(panels, 1)],
    )


def _legend(panels: Sequence[QueryPanel]) -> Html | None:
    entries: list[Html] = []
    if any(_differs(scored.item, panel.query) for panel in panels for scored in panel._scored()):
        entries.append(el("li", None, DIFFERS, "its label differs from the query’s"))
    if any(scored.item.is_mislabelled for panel in panels for scored in panel._scored()):
        entries.append(el("li", None, MISLABELLED, "its label is known to be wrong; given → true"))
    if any(panel.shaded for panel in panels):
        entries.append(key())
    return el("ul", {"class": "legend", "aria-label": "marks"}, entries) if entries else None


def _contents(panels: Sequence[QueryPanel]) -> Html:
    links = []
    for position, panel in enumerate(panels, 1):
        query = panel.query
        face = (
            picture(query, "query", 64)
            if query.image is not None
            else el("span", {"class": "id"}, query.name)
        )
        links.append(el("li", None, el("a", {"href": f"#query-{position}"}, face, _verdict(panel))))
    return el("ol", {"class": "strip", "aria-label": "all queries"}, links)


def _verdict(panel: QueryPanel) -> Html | None:
    return None if panel.is_right is None else RIGHT if panel.is_right else WRONG


def _panel(panel: QueryPanel, position: int) -> Html:
    query = panel.query
    facts = [
        ("true label", label_text(query.label) if query.label is not None else None, None),
        ("predicted", label_text(panel.predicted) if panel.predicted is not None else None, _verdict(panel)),
    ]
    return el(
        "article",
        {"class": f"query kind-{panel.kind}", "id": f"query-{position}"},
        el(
            "header",
            {"class": "asked"},
            el("h3", None, el("span", {"class": "faint"}, "Query "), query.name),
            el("div", {"class": "frame"}, picture(query, "query")) if query.image is not None else None,
            passage(query.text) if query.text is not None else None,
            el(
                "dl",
                {"class": "facts"},
                [
                    el("div", None, el("dt", None, term), el("dd", None, value, sign))
                    for term, value, sign in facts
                    if value is not None
                ],
            )
            if any(value is not None for _, value, _ in facts)
            else None,
            el("p", {"class": "note"}, panel.note) if panel.note else None,
        ),
        el(
            "div",
            {"class": "rows" if len(panel.rows) == 1 else "rows beside"},
            [_row(panel, row, panel.rows[0] if index else None) for index, row in enumerate(panel.rows)],
        ),
    )


def _row(panel: QueryPanel, row: Row, first: Row | None) -> Html:
    largest = largest_score(row.proponents, row.opponents)
    return el(
        "section",
        {"class": "row"},
        el(
            "div",
            {"class": "row-head"},
            el("h4", None, row.name),
            el("p", {"class": "note"}, " · ".join(_remarks(panel.query, row, first))),
        ),
        el(
            "div",
            {"class": "sides"},
            _side(panel, "pro", "▲", "Proponents", row.proponents, largest),
            _side(panel, "opp", "▼", "Opponents", row.opponents, largest),
        ),
    )


def _remarks(query: Item, row: Row, first: Row | None) -> Iterator[str]:
    if row.note:
        yield row.note
    labelled = [scored for scored in row.proponents if scored.item.label is not None]
    if query.label is not None and labelled:
        agreeing = sum(same(scored.item.label, query.label) for scored in labelled)
        yield f"{agreeing} of {count(len(labelled), 'proponent')} with the query’s label"
    if first is not None:
        new = [
            count(_new(here, there), noun)
            for noun, here, there in (
                ("proponent", row.proponents, first.proponents),
                ("opponent", row.opponents, first.opponents),
            )
            if _new(here, there)
        ]
        yield f"{' and '.join(new)} not in “{first.name}”" if new else f"the same examples as “{first.name}”"


def _new(here: Sequence[Scored], there: Sequence[Scored]) -> int:
    known = {scored.item.id for scored in there}
    return sum(scored.item.id not in known for scored in here)


def _side(
    panel: QueryPanel, tone: str, sign: str, title: str, examples: Sequence[Scored], largest: float
) -> Html | None:
    if not len(examples):
        return None
    return el(
        "div",
        {"class": f"side {tone}"},
        el("h5", None, el("span", {"aria-hidden": "true"}, sign + " "), title),
        el(
            "ol",
            {"class": f"examples as-{panel.kind}"},
            [example(scored, panel.kind, largest, _marks(scored.item, panel.query)) for scored in examples],
        ),
    )


def _differs(item: Item, query: Item) -> bool:
    return item.label is not None and query.label is not None and not same(item.label, query.label)


def _marks(item: Item, query: Item) -> list[Html]:
    return [
        *([DIFFERS] if _differs(item, query) else []),
        *([MISLABELLED] if item.is_mislabelled else []),
    ]
