"""Queries and their training examples: a panel for each query, a row for each way of scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unde.console import counted
from unde.data import to_numpy
from unde.errors import UndeError
from unde.markup import Child, Html, el, mark
from unde.ui.report.items import (
    DIFFERS,
    MISLABELLED,
    Item,
    Mark,
    ScoredItem,
    contributor_flags,
    example,
    kind_of,
    label_text,
    largest_score,
    legend_of,
    marks_for,
    passage,
    picture,
    same,
)
from unde.ui.report.tables import legend, section, terms
from unde.ui.report.tokens import key

RIGHT = mark("right", "✓", "right", "the prediction equals the true label")
WRONG = mark("wrong", "✗", "wrong", "the prediction differs from the true label")


@dataclass(frozen=True, eq=False)
class Row:
    """The training examples of a query under one way of scoring: the highest scores and the lowest.

    Where not even the lowest scores are negative (methods whose scores are squares), they are titled lowest scores, not
    opponents. The row of a baseline has `shared`: how many of its top examples are among those of the first row, and
    of how many. Such rows are hidden until they are switched on.

    >>> row = Row("unweighted", [ScoredItem(Item(3), 0.9)], [ScoredItem(Item(8), -0.4)])
    >>> row.name, len(row.opponents)
    ('unweighted', 1)
    """

    name: str
    proponents: Sequence[ScoredItem]
    opponents: Sequence[ScoredItem] = ()
    note: str = ""
    shared: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not len(self.proponents) and not len(self.opponents):
            raise UndeError(f"the row {self.name!r} holds no example: expected proponents, opponents or both")

    @property
    def signed(self) -> bool:
        """Whether scores have signs; assumed where the lowest scores are not known."""
        if self.shared is not None:
            return False
        return not len(self.opponents) or any(scored.score < 0 for scored in self.opponents)


@dataclass(frozen=True, eq=False)
class QueryPanel:
    """A query, its prediction, and its rows (unweighted first).

    Three labels are kept apart: the true one (`query.true_label`, or else `query.label`), the one that was
    `predicted`, and the one `asked` about, whose loss was attributed: by default that of the query. `right` says
    whether the prediction is the true label, where these are not to be compared as they are shown.

    >>> row = Row("weighted", [ScoredItem(Item(3, label=7), 0.9)])
    >>> QueryPanel(Item("q0", label=7), [row], predicted=7).is_right
    True
    >>> QueryPanel(Item("q0", label="cat"), [row], predicted=7).is_right is None
    True
    """

    query: Item
    rows: Sequence[Row]
    predicted: int | str | None = None
    asked: int | str | None = None
    right: bool | None = None

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise UndeError(f"the query {self.query.id!r} has no row of examples: expected at least one")

    @classmethod
    def from_scores(
        cls,
        query: Item,
        example: Callable[[int], Item],
        scores: Mapping[str, object],
        *,
        count: int = 5,
        contributors: Mapping[str, object] | None = None,
    ) -> QueryPanel:
        """Make the panel of a query of its scores (N,) by name; `example` gives the item of training example n.

        `contributors` marks the examples (N,) that are known to have given the query its subject, style, …

        >>> scores = {"no weights": [0.1, 0.9, -0.5], "style": [0.8, 0.2, -0.1]}
        >>> known = {"style": [True, False, False]}
        >>> panel = QueryPanel.from_scores(Item(0), Item, scores, count=1, contributors=known)
        >>> [(row.name, row.proponents[0].item.id, row.proponents[0].marks) for row in panel.rows]
        [('no weights', 1, []), ('style', 0, [Mark(letter='S', contribution='style')])]
        """
        rows = {name: to_numpy(values) for name, values in scores.items()}
        examples = len(next(iter(rows.values()), ()))
        for name, values in rows.items():
            if values.shape != (examples,) or not examples:
                raise UndeError(
                    f"the scores {name!r} have the shape {values.shape}: expected one for each training example, "
                    f"{(examples,)}"
                )
        if count < 1:
            raise UndeError(f"{count} examples on each side: expected at least 1")
        flags = contributor_flags(contributors or {}, (examples,), "each training example")
        marks = marks_for(flags)

        def scored(values: np.ndarray, order: np.ndarray) -> list[ScoredItem]:
            return [
                ScoredItem(example(n), values[n], marks=[marks[name] for name in flags if flags[name][n]])
                for n in map(int, order[:count])
            ]

        return cls(
            query,
            [
                Row(name, scored(v, np.argsort(-v, kind="stable")), scored(v, np.argsort(v, kind="stable")))
                for name, v in rows.items()
            ],
        )

    @property
    def true_label(self) -> int | str | None:
        """The true label of the query, if it is known."""
        return self.query.label if self.query.true_label is None else self.query.true_label

    @property
    def target_label(self) -> int | str | None:
        """The label whose loss was attributed."""
        return self.query.label if self.asked is None else self.asked

    @property
    def is_right(self) -> bool | None:
        """Whether the prediction equals the true label; None where one of them is not known, or one is a number and
        the other a name."""
        if self.right is not None or self.predicted is None or self.true_label is None:
            return self.right
        if same(self.predicted, self.true_label):
            return True
        return None if _is_number(self.predicted) != _is_number(self.true_label) else False

    @property
    def kind(self) -> str:
        """The layout of the panel, from its training examples: "text", "image" or "id"."""
        return "text" if self.shaded else kind_of(scored.item for scored in self._scored())

    @property
    def shaded(self) -> bool:
        """Whether some example has scores of its tokens."""
        return any(scored.tokens is not None for scored in self._scored())

    def _scored(self) -> Iterator[ScoredItem]:
        for row in self.rows:
            yield from row.proponents
            yield from row.opponents


def _is_number(label: object) -> bool:
    return label_text(label).lstrip("-").isdecimal()


def queries_section(panels: Sequence[QueryPanel]) -> Html:
    """The section with all query panels, after a strip of links to them."""
    marks = legend_of(m for panel in panels for scored in panel._scored() for m in scored.marks)
    return section(
        "queries",
        "Queries and the examples behind them",
        _legend(panels, marks),
        _switches(panels),
        _contents(panels) if len(panels) > 2 else None,
        [_panel(panel, position, marks, baseline_names(panels)) for position, panel in enumerate(panels, 1)],
    )


def _legend(panels: Sequence[QueryPanel], marks: Sequence[Mark]) -> Html | None:
    shown = [(scored.item, panel) for panel in panels for scored in panel._scored()]
    entries: list[Child] = []
    if any(_differs(item, panel) for item, panel in shown):
        entries.append([DIFFERS, "its label is not the one asked about"])
    if any(item.is_mislabelled for item, _ in shown):
        entries.append([MISLABELLED, "its label is known to be wrong; given → true"])
    entries += [[each.html(), f"known contributor to the query’s {each.contribution}"] for each in marks]
    return legend([*entries, *([key()] if any(panel.shaded for panel in panels) else [])])


def baseline_names(panels: Sequence[QueryPanel]) -> list[str]:
    """Names of the baselines that the panels have rows of."""
    rows = (row for panel in panels for row in panel.rows)
    return list(dict.fromkeys(row.name for row in rows if row.shared is not None))


def _switches(panels: Sequence[QueryPanel]) -> Html | None:
    """A switch for each baseline, with the mean number of top examples that it shares with the first row."""
    names = baseline_names(panels)
    if not names:
        return None
    labels = []
    for number, name in enumerate(names):
        shared = [row.shared for panel in panels for row in panel.rows if row.name == name and row.shared]
        mean = sum(count for count, _ in shared) / len(shared)
        box = el("input.switch", type="checkbox", id=f"show-baseline-{number}")
        share = f"{mean:.1f}" if shared[1:] else f"{mean:.0f}"
        words = f" shares {share} of its top {shared[0][1]}" + (" on average" if shared[1:] else "")
        labels.append(el("label", box, f" show {name}", el("span.note", words)))
    return el("div.switches", labels, role="group", aria_label="baselines")


def _contents(panels: Sequence[QueryPanel]) -> Html:
    links = []
    for position, panel in enumerate(panels, 1):
        query = panel.query
        face = picture(query, "query", 64) if query.image is not None else el("span.id", query.name)
        links.append(el("li", el("a", face, _verdict(panel), href=f"#query-{position}")))
    return el("ol.strip", links, aria_label="all queries")


def _verdict(panel: QueryPanel) -> Html | None:
    return None if panel.is_right is None else RIGHT if panel.is_right else WRONG


def _panel(panel: QueryPanel, position: int, marks: Sequence[Mark], baselines: Sequence[str]) -> Html:
    query = panel.query
    labels = [
        ("true label", panel.true_label, None),
        ("predicted", panel.predicted, _verdict(panel)),
        ("asked about", panel.target_label if panel.predicted is not None else None, None),
    ]
    facts = [(term, [label_text(label), sign]) for term, label, sign in labels if label is not None]
    return el(
        f"article.query.kind-{panel.kind}",
        el(
            "header.asked",
            el("h3", el("span.faint", "Query "), query.name),
            el("div.frame", picture(query, "query")) if query.image is not None else None,
            el("div.prompt", el("h4.note", "Prompt"), passage(query.prompt or "(empty)"))
            if query.prompt is not None
            else None,
            passage(query.text) if query.text is not None else None,
            terms("facts", facts) if facts else None,
        ),
        el(
            f"div.{_layout(panel)}",
            [
                _row(panel, row, panel.rows[0] if index else None, marks, baselines)
                for index, row in enumerate(panel.rows)
            ],
        ),
        id=f"query-{position}",
    )


def _layout(panel: QueryPanel) -> str:
    """Classes of the rows: side by side where there are several; baselines when they are switched on."""
    compared = any(row.shared is not None for row in panel.rows)
    several = sum(row.shared is None for row in panel.rows) > 1
    return "rows" + (" beside" if several else "") + (" compared" if compared else "")


def _row(
    panel: QueryPanel, row: Row, first: Row | None, marks: Sequence[Mark], baselines: Sequence[str]
) -> Html:
    largest = largest_score(row.proponents, row.opponents)
    high, low = ("high", "▲", "Highest scores"), ("low", "▽", "Lowest scores")
    if row.signed:
        high, low = ("pro", "▲", "Proponents"), ("opp", "▼", "Opponents")
    kind = "row" if row.shared is None else f"row.baseline.baseline-{baselines.index(row.name)}"
    return el(
        f"section.{kind}",
        el("div.row-head", el("h4", row.name), el("p.note", " · ".join(_remarks(panel, row, first, marks)))),
        el(
            "div.sides",
            _side(panel, *high, row.proponents, largest),
            _side(panel, *low, row.opponents, largest),
        ),
    )


def _remarks(panel: QueryPanel, row: Row, first: Row | None, marks: Sequence[Mark]) -> Iterator[str]:
    if row.note:
        yield row.note
    labelled = [scored for scored in row.proponents if scored.item.label is not None]
    if panel.target_label is not None and labelled:
        agreeing = sum(same(scored.item.label, panel.target_label) for scored in labelled)
        yield f"{agreeing} of {counted(len(labelled), 'proponent')} with the label asked about"
    if marks:
        present = [m for scored in row.proponents for m in scored.marks]
        amounts = ", ".join(f"{present.count(each)} {each.contribution}" for each in marks)
        yield f"of the first {len(row.proponents)}: {amounts}"
    if first is not None and row.shared is not None:
        yield f"shares {row.shared[0]} of its top {row.shared[1]} with “{first.name}”"
    elif first is not None:
        high, low = ("proponent", "opponent") if row.signed else ("high score", "low score")
        sides = ((high, row.proponents, first.proponents), (low, row.opponents, first.opponents))
        new = [counted(_new(*lists), noun) for noun, *lists in sides if _new(*lists)]
        yield f"{' and '.join(new)} not in “{first.name}”" if new else f"the same examples as “{first.name}”"


def _new(items: Sequence[ScoredItem], others: Sequence[ScoredItem]) -> int:
    known = {scored.item.id for scored in others}
    return sum(scored.item.id not in known for scored in items)


def _side(
    panel: QueryPanel, tone: str, sign: str, title: str, examples: Sequence[ScoredItem], largest: float
) -> Html | None:
    if not len(examples):
        return None
    return el(
        f"div.side.{tone}",
        el("h5", el("span", sign + " ", aria_hidden="true"), title),
        el(
            f"ol.examples as-{panel.kind}",
            [example(scored, panel.kind, largest, _marks(scored, panel)) for scored in examples],
        ),
    )


def _differs(item: Item, panel: QueryPanel) -> bool:
    target = panel.target_label
    return item.label is not None and target is not None and not same(item.label, target)


def _marks(scored: ScoredItem, panel: QueryPanel) -> list[Html]:
    item = scored.item
    return [
        *(each.html() for each in scored.marks),
        *([DIFFERS] if _differs(item, panel) else []),
        *([MISLABELLED] if item.is_mislabelled else []),
    ]
