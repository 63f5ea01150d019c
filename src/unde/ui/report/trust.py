"""How good scores are on the data at hand: copies that find their originals, and the LDS of a calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unde.console import counted
from unde.index.calibration import LOCAL, Calibration
from unde.index.retrieval_curve import Curve, Trust
from unde.index.self_retrieval import summary
from unde.markup import Html, el, number
from unde.ui.report.svg import (
    Line,
    PlotFrame,
    caption,
    curve_key,
    dot,
    grid_lines,
    line_plot,
    rect,
    stroke,
    svg,
)
from unde.ui.report.tables import ResultTable, lead, note, result_table, section
from unde.weights import Weights

MEANING = (
    "Each of these training examples was changed a little, then more, and the method ranked all training examples for "
    "it. The curve is the share of changed examples whose original came first."
)
LIMITS = (
    "It measures whether the method recognises a changed example, and compares methods, settings and weights on this "
    "data. It does not measure whether scores predict retrained models (LDS does), and it misses errors that a copy "
    "shares with its original."
)


@dataclass(frozen=True)
class TrustPanel:
    """Results of `index.trust` by the names of their weights; the unweighted shares are the same in all."""

    trusts: Mapping[str, Trust]
    weights: Mapping[str, Weights] = field(default_factory=dict)
    unweighted: str = "unweighted"  # the name of scores without weights

    @property
    def means(self) -> dict[str, str]:
        """The mean share of each way of scoring, as text: unweighted, and under weights that are not uniform."""
        first = next(iter(self.trusts.values()))
        means = {self.unweighted: f"{100 * first.before:.0f} %"}
        return means | {name: _after(self.trusts[name]) for name, w in self.weights.items() if not uniform(w)}

    def shares(self, number: int) -> dict[str, list[float]]:
        """The shares of each way of scoring on one of the curves."""
        ways = {way: self.trusts[way].curves[number].after or [] for way in list(self.means)[1:]}
        return {self.unweighted: next(iter(self.trusts.values())).curves[number].before, **ways}


def _after(trust: Trust) -> str:
    return f"{100 * (trust.after or 0):.0f} % ({trust.change})"


def trust_section(panel: TrustPanel) -> Html:
    """The section with the verdicts of the guard, and a plot and a table for each kind of perturbation."""
    first = next(iter(panel.trusts.values()))
    verdicts = {name: words for name, w in panel.weights.items() if (words := verdict(w))}
    return section(
        "trust",
        "Trust: do training examples find themselves?",
        lead(MEANING, " ", LIMITS),
        [
            lead(el("strong", f"{name}: " if len(verdicts) > 1 else ""), words)
            for name, words in verdicts.items()
        ],
        note("" if first.held_out else FEW),
        [_kind(c, panel.shares(i), panel.means, len(first.curves) > 1) for i, c in enumerate(first.curves)],
    )


def _kind(
    curve: Curve, shares: Mapping[str, Sequence[float]], means: Mapping[str, str], several: bool
) -> Html:
    ends = "; ".join(
        f"{way} from {number(100 * some[0])} % to {number(100 * some[-1])} %" for way, some in shares.items()
    )
    x = [math.log(s) for s in curve.strengths]
    plot = line_plot(
        [Line(way, x, some, *zip(*map(curve.interval, some))) for way, some in shares.items()],
        title=f"Share of copies that find their original, by strength of {curve.kind}: {ends}",
        x_label=f"strength of {curve.kind}, logarithmic",
        y_label="share found",
        y_range=(0.0, 1.0),
        x_ticks=[(math.log(s), f"{s:.2g}") for s in curve.strengths],
    )
    legend = el(
        "figcaption",
        curve_key(list(means.items())),
        f"The number beside each name is the mean share over all strengths{' and kinds' if several else ''}; "
        "bands are 95 % intervals.",
    )
    heading = el("h3", f"Copies that find their original: {curve.kind}")
    return el("div.pair", el("figure", heading, plot, legend), _table(curve, shares))


def _table(curve: Curve, shares: Mapping[str, Sequence[float]]) -> Html:
    rows = [
        [f"{strength:.2g}", *(_share(some[i], *curve.interval(some[i])) for some in shares.values())]
        for i, strength in enumerate(curve.strengths)
    ]
    title = f"In %, {counted(curve.examples, 'example')}"
    remark = "With 95 % intervals (Wilson). Strengths are the same for all methods."
    return result_table(ResultTable(title, ["strength", *shares], rows, note=remark))


def _share(share: float, low: float, high: float) -> str:
    return f"{100 * share:.0f} [{100 * low:.0f}, {100 * high:.0f}]"


def uniform(weights: Weights) -> bool:
    """Whether weights are the unweighted method.

    >>> uniform(Weights.uniform(["a", "b"]))
    True
    """
    return bool((weights.values == 1).all())


FEW = (
    "There are too few training examples to leave some alone: these are the ones that self-retrieval reports on. "
    "Weights were not learned from them."
)


def verdict(weights: Weights) -> str:
    """The verdict of the guard of self-retrieval on weights, as a sentence; empty without one.

    >>> from dataclasses import replace
    >>> verdict(Weights.uniform(["a"])), verdict(replace(Weights.uniform(["a"]), provenance={"confirmed": True}))
    ('', 'The guard of self-retrieval confirmed these weights.')
    """
    p = weights.provenance
    if "found" in p:
        words = summary(weights).replace("= -", "= −")
        return f"{words[0].upper()}{words[1:]}."
    if "confirmed" not in p:
        return ""
    if p["confirmed"]:
        return "The guard of self-retrieval confirmed these weights."
    return "The guard of self-retrieval confirmed none of the candidates: these weights are uniform."


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
