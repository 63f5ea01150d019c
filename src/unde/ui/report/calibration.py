"""The calibration of an index on a page: the expected LDS, and all settings as sorted bars."""

from __future__ import annotations

from dataclasses import dataclass

from unde.index.calibration import LOCAL, Calibration
from unde.markup import Html, el
from unde.ui.report.svg import PlotFrame, caption, dot, grid_lines, rect, stroke, svg
from unde.ui.report.tables import ResultTable, lead, result_table, section

WIDTH, HEIGHT = 760.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 190.0, 16.0, 26.0  # margins
BEST = 8  # settings in the table
MEANING = (
    "LDS (linear datamodeling score): models were retrained on random halves of the training data, and this is the "
    "rank correlation, in %, of predicted and actual results of these models, averaged over queries. The "
    "number to expect is cross-fitted: no model or query was judged by a setting that it helped to choose."
)


@dataclass(frozen=True)
class CalibrationPanel:
    """The values of a calibration, in %."""

    sentence: str
    settings: list[tuple[str, float, float]]  # name, LDS, half width of its interval; the best first
    chosen: str
    expected: tuple[float, float]  # LDS and half width
    ceiling: float | None
    baselines: dict[str, float]
    local: bool


def calibration_panel(calibration: Calibration | None) -> CalibrationPanel | None:
    """Make the panel of a calibration; None without one."""
    if calibration is None:
        return None
    half = calibration.expected.ci95_total or calibration.expected.ci95
    return CalibrationPanel(
        sentence=f"{calibration}.",
        settings=[(s["name"], 100 * s["lds"], 100 * s["ci95"]) for s in calibration.settings],
        chosen=calibration.setting.name,
        expected=(100 * calibration.expected.mean, 100 * half),
        ceiling=None if calibration.ceiling is None else 100 * calibration.ceiling,
        baselines={name: 100 * b["lds"] for name, b in calibration.baselines.items()},
        local=calibration.how == LOCAL,
    )


def calibration_section(panel: CalibrationPanel) -> Html:
    """The section with the sentence, the bars of all settings and a table of the best."""
    settings = panel.settings[:BEST]
    settings += [s for s in panel.settings[BEST:] if s[0] == panel.chosen]
    rows = [[f"{n} (chosen)" if n == panel.chosen else n, f"{v:.1f} ± {h:.1f}"] for n, v, h in settings]
    rows += [[f"baseline: {name}", f"{value:.1f}"] for name, value in panel.baselines.items()]
    remark = (
        f"Unweighted; {len(panel.settings)} settings were judged. 95 % intervals over queries and models."
    )
    return section(
        "calibration",
        "Calibration: how good are these scores?",
        lead(el("strong", None, panel.sentence)),
        lead(MEANING),
        el("figure", None, bar_strip(panel), el("figcaption", None, _caption(panel))),
        result_table(ResultTable("LDS, %", ["setting", "LDS"], rows, note=remark)),
        kind="calibration",
    )


def bar_strip(panel: CalibrationPanel) -> Html:
    """All settings as bars, the best first; baselines and the ceiling as lines."""
    lines = [(f"{name} {value:.0f}", value, "baseline") for name, value in panel.baselines.items()]
    lines += [] if panel.ceiling is None else [(f"at most {panel.ceiling:.0f}", panel.ceiling, "ceiling")]
    values = [value for _, value, _ in (*panel.settings, *lines)]
    y_range = min(0.0, *values), max(1.0, *values, sum(panel.expected)) * 1.04
    frame = PlotFrame(LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM, (0, len(panel.settings)), y_range)
    x, y, (mean, half) = frame.x, frame.y, panel.expected
    bars = [
        rect(
            "setting chosen" if name == panel.chosen else "setting",
            x(i),
            y(max(value, 0)),
            max(1.0, 0.8 * (x(1) - x(0))),
            abs(y(value) - y(0)),
            f"{name}: {value:.1f} ± {half:.1f}",
        )
        for i, (name, value, half) in enumerate(panel.settings)
    ]
    middle = x(0.4 + next((i for i, s in enumerate(panel.settings) if s[0] == panel.chosen), 0))
    labels = _spread([(text, y(value), kind) for text, value, kind in lines])
    return svg(
        WIDTH,
        HEIGHT,
        f"LDS of {len(panel.settings)} settings, sorted; chosen: {panel.chosen}",
        "plot settings-strip",
        grid_lines(frame),
        bars,
        stroke("whisker", middle, y(mean - half), middle, y(mean + half)),
        dot("expected", middle, y(mean), 4),
        [stroke(kind, frame.left, y(value), frame.right, y(value)) for _, value, kind in lines],
        [caption(f"label {kind}", frame.right + 8, height + 4, text) for text, height, kind in labels],
        caption("tick", LEFT, HEIGHT - 6, "settings, the best first"),
    )


def _caption(panel: CalibrationPanel) -> str:
    models = "short continued trainings" if panel.local else "retrained models"
    ceiling = (
        ""
        if panel.ceiling is None
        else ", the solid line is the limit set by noise between two training seeds"
    )
    return (
        f"Each bar is a setting, judged on {models}; the filled one is {panel.chosen}. The dot is the LDS to expect of "
        f"it, with its 95 % interval. Dashed lines are simple baselines{ceiling}."
    )


def _spread(labels: list[tuple[str, float, str]], room: float = 14.0) -> list[tuple[str, float, str]]:
    """Move labels down until none covers another.

    >>> _spread([("a", 20.0, ""), ("b", 22.0, "")])
    [('a', 20.0, ''), ('b', 34.0, '')]
    """
    out: list[tuple[str, float, str]] = []
    for text, height, kind in sorted(labels, key=lambda label: label[1]):
        out.append((text, max(height, out[-1][1] + room) if out else height, kind))
    return out
