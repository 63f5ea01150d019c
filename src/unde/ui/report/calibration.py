"""How good scores are on the data at hand: the LDS of a calibration."""

from __future__ import annotations

from unde.index.calibration import LOCAL, Calibration
from unde.markup import Html, el
from unde.ui.report.svg import (
    PlotFrame,
    caption,
    dot,
    grid_lines,
    rect,
    stroke,
    svg,
)
from unde.ui.report.tables import ResultTable, lead, result_table, section
from unde.weights import Weights


def uniform(weights: Weights) -> bool:
    """Whether weights are the unweighted method.

    >>> uniform(Weights.uniform(["a", "b"]))
    True
    """
    return bool((weights.values == 1).all())


WIDTH, HEIGHT = 760.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 190.0, 16.0, 26.0  # margins
BEST = 8  # settings in the table
LDS_MEANING = (
    "LDS (linear datamodeling score): models were retrained on random halves of the training data, and this is the "
    "rank correlation, in %, of predicted and actual results of these models, averaged over queries. The "
    "number to expect is cross-fitted: no model or query was judged by a setting that it helped to choose."
)


def calibration_section(calibration: Calibration) -> Html:
    """The section with the sentence of a calibration, the bars of all its settings and a table of the best."""
    chosen, settings = calibration.setting.name, list(calibration.settings)
    rows = [
        [f"{s['name']} (chosen)" if s["name"] == chosen else s["name"], _percent(s["lds"], s["ci95"])]
        for i, s in enumerate(settings)
        if i < BEST or s["name"] == chosen
    ]
    rows += [[f"baseline: {name}", f"{100 * b['lds']:.1f}"] for name, b in calibration.baselines.items()]
    remark = f"Unweighted; {len(settings)} settings were judged. 95 % intervals over queries and models."
    return section(
        "calibration",
        "Calibration: how good are these scores?",
        lead(el("strong", f"{calibration}.")),
        lead(LDS_MEANING),
        el("figure", bar_strip(calibration), el("figcaption", _caption(calibration))),
        result_table(ResultTable("LDS, %", ["setting", "LDS"], rows, note=remark)),
    )


def _percent(mean: float, half: float) -> str:
    return f"{100 * mean:.1f} ± {100 * half:.1f}"


def bar_strip(calibration: Calibration) -> Html:
    """All settings as bars, the best first; baselines and the ceiling as lines."""
    settings, chosen = calibration.settings, calibration.setting.name
    baselines = calibration.baselines.items()
    lines = [(f"{name} {100 * b['lds']:.0f}", b["lds"], "baseline") for name, b in baselines]
    if calibration.ceiling is not None:
        lines.append((f"at most {100 * calibration.ceiling:.0f}", calibration.ceiling, "ceiling"))
    mean = calibration.expected.mean
    half = calibration.expected.ci95_total or calibration.expected.ci95
    values = [100 * value for value in (*(s["lds"] for s in settings), *(value for _, value, _ in lines))]
    y_range = min(0.0, *values), max(1.0, *values, 100 * (mean + half)) * 1.04
    frame = PlotFrame(LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM, (0, len(settings)), y_range)

    def y(share: float) -> float:
        return frame.y(100 * share)

    bars = [
        rect(
            "setting chosen" if s["name"] == chosen else "setting",
            frame.x(i),
            y(max(s["lds"], 0)),
            max(1.0, 0.8 * (frame.x(1) - frame.x(0))),
            abs(y(s["lds"]) - y(0)),
            f"{s['name']}: {_percent(s['lds'], s['ci95'])}",
        )
        for i, s in enumerate(settings)
    ]
    middle = frame.x(0.4 + next((i for i, s in enumerate(settings) if s["name"] == chosen), 0))
    labels = _spread([(text, y(value), kind) for text, value, kind in lines])
    return svg(
        WIDTH,
        HEIGHT,
        f"LDS of {len(settings)} settings, sorted; chosen: {chosen}",
        "plot settings-strip",
        grid_lines(frame),
        bars,
        stroke("whisker", middle, y(mean - half), middle, y(mean + half)),
        dot("expected", middle, y(mean), 4),
        [stroke(kind, frame.left, y(value), frame.right, y(value)) for _, value, kind in lines],
        [caption(f"label {kind}", frame.right + 8, height + 4, text) for text, height, kind in labels],
        caption("tick", LEFT, HEIGHT - 6, "settings, the best first"),
    )


def _caption(calibration: Calibration) -> str:
    models = "short continued trainings" if calibration.how == LOCAL else "retrained models"
    limit = ", the solid line is the limit set by noise between two training seeds"
    return (
        f"Each bar is a setting, judged on {models}; the filled one is {calibration.setting.name}. The dot is the LDS "
        "to expect of it, with its 95 % interval. Dashed lines are simple baselines"
        f"{limit if calibration.ceiling is not None else ''}."
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
