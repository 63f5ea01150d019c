"""The first screen of a page: answers, how well they predict retrained models, and what weights changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unde.markup import Html, el, number
from unde.ui.report.items import label_of, label_text, picture
from unde.ui.report.queries import QueryPanel, Row
from unde.ui.report.svg import PlotFrame, bar_plot, caption, rect, stroke, svg, ticks
from unde.ui.report.tables import note, table
from unde.ui.report.weights import WeightsPanel, arrange, weight_bars

WIDTH, NAME, SLOT, TOP = 440.0, 212.0, 30.0, 8.0


@dataclass(frozen=True)
class Measured:
    """How well some scores predict retrained models: LDS with the half width of its 95 % interval, in %."""

    name: str
    lds: float
    half: float
    kind: str = ""  # "after" for what the page recommends, "baseline" for simple scores, else ""


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


def lds_bars(measured: Sequence[Measured]) -> Html:
    """Horizontal bars with their intervals.

    >>> lds_bars([Measured("loss", 3.0, 1.0, "baseline"), Measured("weighted", 9.0, 1.0, "after")]).count("<rect")
    2
    """
    ends = [m.lds + m.half for m in measured] + [m.lds - m.half for m in measured]
    high, low = max(1.0, *ends) * 1.02, min(0.0, *ends) * 1.02
    bottom = TOP + SLOT * len(measured)
    # A frame whose axes are swapped: y of the frame runs along the bars.
    frame = PlotFrame(NAME, WIDTH - 46, TOP, bottom, (low, high), (0, 1))
    marks = []
    for i, m in enumerate(measured):
        middle = TOP + SLOT * (i + 0.5)
        left, right = sorted((frame.x(0), frame.x(m.lds)))
        marks += [
            caption("measure-name", NAME - 8, middle + 4, m.name, "end"),
            rect(f"measure {m.kind}".strip(), left, middle - 8, max(1.0, right - left), 16, _words(m)),
            stroke("whisker", frame.x(m.lds - m.half), middle, frame.x(m.lds + m.half), middle),
            caption("measure-value", frame.x(m.lds + m.half) + 6, middle + 4, f"{m.lds:.1f}"),
        ]
    axis = [
        [
            stroke("grid", frame.x(at), TOP, frame.x(at), bottom),
            caption("tick", frame.x(at), bottom + 15, number(at), "middle"),
        ]
        for at in ticks(low, high)
    ]
    title = "LDS in %: " + ", ".join(_words(m) for m in measured)
    return svg(WIDTH, bottom + 22, title, "plot measured", axis, marks)


def _words(m: Measured) -> str:
    return f"{m.name} {m.lds:.1f} ± {m.half:.1f}"


def _changes(changes: Sequence[Change]) -> Html:
    heads = [el("th", ""), *(el("th.number", name, scope="col") for name in ("unweighted", "weighted"))]
    rows = [
        el("tr", el("th", c.name, scope="row"), el("td.number", c.before), el("td.number", c.after))
        for c in changes
    ]
    return table(heads, rows)
