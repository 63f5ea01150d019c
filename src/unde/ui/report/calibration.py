"""What a calibration says, on a page: the LDS to expect in words, and all settings as a sorted strip of bars."""

from __future__ import annotations

from dataclasses import dataclass

from unde.index.calibration import LOCAL, Calibration
from unde.markup import Html, el
from unde.ui.report.svg import ticks
from unde.ui.report.tables import ResultTable, result_table

WIDTH, HEIGHT = 760.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 190.0, 16.0, 26.0  # margins
BEST = 8  # settings in the table
MEANING = (
    "LDS (linear datamodeling score): models were retrained on random halves of the training data, and this is the "
    "rank correlation, in %, of what the scores predict for them with what they did, averaged over queries. The "
    "number to expect is cross-fitted: no model or query was judged by a setting that it helped to choose."
)


@dataclass(frozen=True)
class CalibrationPanel:
    """A calibration as a page shows it; values in %."""

    sentence: str
    settings: list[tuple[str, float, float]]  # name, LDS, half width of its interval; the best first
    chosen: str
    expected: tuple[float, float]  # LDS and half width
    ceiling: float | None
    baselines: dict[str, float]
    local: bool


def calibration_panel(calibration: Calibration | None) -> CalibrationPanel | None:
    """The panel of a calibration; None without one."""
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
    """The section with the sentence, the strip and the best settings."""
    shown = panel.settings[:BEST]
    shown += [s for s in panel.settings[BEST:] if s[0] == panel.chosen]
    rows = [[f"{n} (chosen)" if n == panel.chosen else n, f"{v:.1f} ± {h:.1f}"] for n, v, h in shown]
    rows += [[f"baseline: {name}", f"{value:.1f}"] for name, value in panel.baselines.items()]
    note = f"Unweighted; {len(panel.settings)} settings were judged. 95 % intervals over queries and models."
    return el(
        "section",
        {"id": "calibration", "class": "calibration", "aria-labelledby": "calibration-title"},
        el("h2", {"id": "calibration-title"}, "Calibration: how good are these scores?"),
        el("p", {"class": "lead"}, el("strong", None, panel.sentence)),
        el("p", {"class": "lead"}, MEANING),
        el("figure", None, strip(panel), el("figcaption", None, _caption(panel))),
        result_table(ResultTable("LDS, %", ["setting", "LDS"], rows, note=note)),
    )


def strip(panel: CalibrationPanel) -> Html:
    """All settings as bars, the best first; baselines and the ceiling as lines."""
    marks = [*panel.baselines.values(), *([] if panel.ceiling is None else [panel.ceiling])]
    values = [value for _, value, _ in panel.settings]
    high = max(1.0, *values, *marks, sum(panel.expected)) * 1.04
    low = min(0.0, *values, *marks)
    inside = HEIGHT - TOP - BOTTOM

    def y(value: float) -> float:
        return TOP + inside * (high - value) / (high - low)

    slot = (WIDTH - LEFT - RIGHT) / len(panel.settings)
    bars = [
        el(
            "rect",
            {
                "class": "setting chosen" if name == panel.chosen else "setting",
                "x": f"{LEFT + i * slot:.1f}",
                "y": f"{y(max(value, 0)):.1f}",
                "width": f"{max(1.0, slot * 0.8):.1f}",
                "height": f"{abs(y(value) - y(0)):.1f}",
            },
            el("title", None, f"{name}: {value:.1f} ± {half:.1f}"),
        )
        for i, (name, value, half) in enumerate(panel.settings)
    ]
    at = next((i for i, s in enumerate(panel.settings) if s[0] == panel.chosen), 0)
    middle = LEFT + (at + 0.4) * slot
    lines = [(f"{name} {value:.0f}", value, "baseline") for name, value in panel.baselines.items()]
    lines += [] if panel.ceiling is None else [(f"at most {panel.ceiling:.0f}", panel.ceiling, "ceiling")]
    labels = _apart([(text, y(value), kind) for text, value, kind in lines])
    grid = [t for t in ticks(low, high) if low <= t <= high]
    return el(
        "svg",
        {
            "class": "plot settings-strip",
            "role": "img",
            "aria-label": f"LDS of {len(panel.settings)} settings, sorted; chosen: {panel.chosen}",
            "width": f"{WIDTH:g}",
            "height": f"{HEIGHT:g}",
            "viewBox": f"0 0 {WIDTH:g} {HEIGHT:g}",
        },
        [_line("grid", LEFT, y(t), WIDTH - RIGHT, y(t)) for t in grid],
        [_words("tick", LEFT - 7, y(t) + 4, f"{t:g}", "end") for t in grid],
        bars,
        _line("whisker", middle, y(panel.expected[0] - panel.expected[1]), middle, y(sum(panel.expected))),
        el(
            "circle",
            {"class": "expected", "cx": f"{middle:.1f}", "cy": f"{y(panel.expected[0]):.1f}", "r": 4},
        ),
        [_line(kind, LEFT, y(value), WIDTH - RIGHT, y(value)) for _, value, kind in lines],
        [
            _words(f"label {kind}", WIDTH - RIGHT + 8, height + 4, text, "start")
            for text, height, kind in labels
        ],
        _words("tick", LEFT, HEIGHT - 6, "settings, the best first", "start"),
    )


def _caption(panel: CalibrationPanel) -> str:
    kind = "short continued trainings" if panel.local else "retrained models"
    return (
        f"Each bar is a setting, judged on {kind}; the filled one is {panel.chosen}. The dot is the LDS to expect of "
        "it, with its 95 % interval. Dashed lines are simple baselines"
        + (
            "."
            if panel.ceiling is None
            else ", the solid line what the noise between two training seeds leaves."
        )
    )


def _apart(labels: list[tuple[str, float, str]], room: float = 14.0) -> list[tuple[str, float, str]]:
    """Labels moved down until none covers another.

    >>> _apart([("a", 20.0, ""), ("b", 22.0, "")])
    [('a', 20.0, ''), ('b', 34.0, '')]
    """
    out: list[tuple[str, float, str]] = []
    for text, height, kind in sorted(labels, key=lambda label: label[1]):
        out.append((text, max(height, out[-1][1] + room) if out else height, kind))
    return out


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Html:
    return el(
        "line", {"class": kind, "x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    )


def _words(kind: str, x: float, y: float, words: str, anchor: str) -> Html:
    return el("text", {"class": kind, "x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}, words)
