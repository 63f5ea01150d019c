"""The first screen of a page: answers, how well they predict retrained models, and what weights changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unde.markup import Html, el
from unde.ui.report.calibration import Measured, lds_bars
from unde.ui.report.items import label_of, label_text, picture
from unde.ui.report.queries import QueryPanel, Row
from unde.ui.report.svg import bar_plot
from unde.ui.report.tables import note, table
from unde.ui.report.weights import WeightsPanel, arrange, weight_bars


@dataclass(frozen=True)
class Change:
    """A number before and after weights."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, eq=False)
class SummaryPanel:
    """What a reader should see first.

    `queries` are shown with the proponents of each of their rows, `measured` as bars, `weights` as a plot of the
    network, `changes` as a table. `verdict` says in a sentence what the weights gained.
    """

    verdict: str
    queries: Sequence[QueryPanel]
    measured: Sequence[Measured]
    weights: WeightsPanel
    changes: Sequence[Change]
    note: str = ""


def summary_section(panel: SummaryPanel) -> Html:
    """The section without a heading of its own, in three parts side by side."""
    plot = arrange(panel.weights)
    return el(
        "section.summary",
        el("p.verdict", panel.verdict),
        el(
            "div.thirds",
            el("div", el("h2", "The answers"), [_answers(query) for query in panel.queries]),
            el(
                "div",
                el("h2", "Do they predict retrained models?"),
                el("figure", lds_bars(panel.measured)),
                note(panel.note),
            ),
            el(
                "div",
                el("h2", "What weights changed"),
                el(
                    "figure.scroll",
                    bar_plot(weight_bars(plot), title="Weights over the network", compact=True),
                    tabindex="0",
                    role="region",
                    aria_label="weights over the network",
                ),
                _changes(panel.changes),
            ),
        ),
        id="summary",
        aria_label="summary",
    )


def _answers(panel: QueryPanel) -> Html:
    """A query and the proponents of each way of scoring, in one line each."""
    asked = panel.query
    words = f"label {label_text(panel.true_label)}" if panel.true_label is not None else asked.name
    if panel.predicted is not None:
        words += f", predicted {label_text(panel.predicted)}"
    return el(
        "div.answer",
        el("div.frame", picture(asked, "query"), el("span.note", words)),
        el("div.lines", [_line(row) for row in panel.rows]),
    )


def _line(row: Row) -> Html:
    pictures = [
        el("li", picture(scored.item, "training example"), label_of(scored.item)) for scored in row.proponents
    ]
    return el("div.line", el("h3", row.name), el("ol", pictures))


def _changes(changes: Sequence[Change]) -> Html:
    heads = [el("th", ""), *(el("th.number", name, scope="col") for name in ("unweighted", "weighted"))]
    rows = [
        el("tr", el("th", c.name, scope="row"), el("td.number", c.before), el("td.number", c.after))
        for c in changes
    ]
    return table(heads, rows)
