"""How well scores predict retrained models: bars of the LDS, and the section of a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unde.index.calibration import LOCAL, Calibration
from unde.markup import Html, el, number
from unde.ui.report.svg import CHARACTER, PlotFrame, caption, rect, stroke, svg, ticks
from unde.ui.report.tables import lead, note, section

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
