"""How well scores predict retrained models, and what weights changed: the first screen of a page, and calibrations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unde.index.calibration import LOCAL, Calibration
from unde.markup import Html, el, number
from unde.ui.report.items import label_of, label_text, picture
from unde.ui.report.queries import QueryPanel, Row
from unde.ui.report.svg import CHARACTER, PlotFrame, bar_plot, caption, rect, stroke, svg, ticks
from unde.ui.report.tables import lead, note, section, table
from unde.ui.report.weights import WeightsPanel, arrange, weight_bars

SLOT, TOP, LENGTH = 30.0, 8.0, 180.0
BEST = 8  # settings that are shown
LDS_MEANING = (
    "LDS (linear datamodeling score): models were retrained on random halves of the training data, and this is the "
    "rank correlation, in %, of predicted and actual results of these models, averaged over queries. The "
    "number to expect is cross-fitted: no model or query was judged by a setting that it helped to choose."
)


@dataclass(frozen=True)
class Measured:
    """How well some scores predict retrained models: LDS with the half width of its 95 % interval, in %."""

    name: str
    lds: float
    half: float = 0.0
    kind: str = ""  # "after" for what the page recommends, "baseline" for simple scores, else ""

    def __str__(self) -> str:
        return f"{self.name} {self.lds:.1f}" + (f" ± {self.half:.1f}" if self.half else "")


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


def lds_bars(measured: Sequence[Measured]) -> Html:
    """Horizontal bars with their intervals.

    >>> lds_bars([Measured("loss", 3.0, 1.0, "baseline"), Measured("weighted", 9.0, 1.0, "after")]).count("<rect")
    2
    """
    ends = [m.lds + m.half for m in measured] + [m.lds - m.half for m in measured]
    high, low = max(1.0, *ends) * 1.02, min(0.0, *ends) * 1.02
    left, bottom = 14 + CHARACTER * max(len(m.name) for m in measured), TOP + SLOT * len(measured)
    # A frame whose axes are swapped: y of the frame runs along the bars.
    frame = PlotFrame(left, left + LENGTH, TOP, bottom, (low, high), (0, 1))
    marks = []
    for i, m in enumerate(measured):
        middle = TOP + SLOT * (i + 0.5)
        start, stop = sorted((frame.x(0), frame.x(m.lds)))
        marks += [
            caption("measure-name", left - 8, middle + 4, m.name, "end"),
            rect(f"measure {m.kind}".strip(), start, middle - 8, max(1.0, stop - start), 16, str(m)),
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
    title = "LDS in %: " + ", ".join(map(str, measured))
    return svg(left + LENGTH + 46, bottom + 22, title, "plot measured", axis, marks)


def calibration_section(calibration: Calibration) -> Html:
    """The section with the sentence of a calibration and bars of its best settings and of the baselines."""
    chosen, models = calibration.setting.name, "retrained models"
    if calibration.how == LOCAL:
        models = "short continued trainings"
    settings = [
        Measured(s["name"], 100 * s["lds"], 100 * s["ci95"], "after" if s["name"] == chosen else "")
        for i, s in enumerate(calibration.settings)
        if i < BEST or s["name"] == chosen
    ]
    simple = [Measured(name, 100 * b["lds"], kind="baseline") for name, b in calibration.baselines.items()]
    ceiling = () if calibration.ceiling is None else (Measured("at most", 100 * calibration.ceiling),)
    return section(
        "calibration",
        "Calibration: how good are these scores?",
        lead(el("strong", f"{calibration}.")),
        lead(LDS_MEANING),
        el("figure", lds_bars([*ceiling, *settings, *simple])),
        note(
            f"LDS, %, of the best of {len(calibration.settings)} settings, unweighted and judged on {models}, with "
            f"95 % intervals over queries and models; {chosen} was chosen. Below them simple baselines"
            + ("; above them the limit set by noise between two training seeds." if ceiling else ".")
        ),
    )
