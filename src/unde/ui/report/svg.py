"""Small plots as inline SVG: bars and curves. Colours are classes of the style sheet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unde.errors import UndeError
from unde.markup import Child, Html, el, number
from unde.ui.report.tables import terms

TONES = 6  # colours that blocks cycle through: .tone-0 … .tone-5 in the style
_LABELLED_BARS = 64  # up to here every bar carries its name; beyond, blocks and tooltips do
CHARACTER = 6.3  # width of a character of the plots' 11 px text, generously
_LONGEST_LABEL = 30
_UNIFORM = "uniform"  # the label of the line at 1
_COMPACT = 540.0  # width of a plot that stands beside another one
_MAX_POINTS = 600  # a curve drawn a few hundred pixels wide needs no more


@dataclass(frozen=True)
class Bar:
    """One bar: value, name, tooltip, its block and a word above it (such as its rank)."""

    value: float
    label: str
    tooltip: str = ""
    block: str = ""
    above: str = ""


@dataclass(frozen=True, eq=False)
class Line:
    """One curve by its points."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not len(self.x):
            raise UndeError(
                f"the curve {self.name!r} has {len(self.x)} x and {len(self.y)} y values: "
                "expected equally many, and at least one"
            )


@dataclass(frozen=True)
class PlotFrame:
    """The plotting area of a picture, and the map from data to it."""

    left: float
    right: float
    top: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers inside [low, high], about `count` of them.

    >>> ticks(0, 1), ticks(0, 7.3), ticks(-0.021, -0.013)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 2.0, 4.0, 6.0], [-0.02, -0.018, -0.016, -0.014])
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * power - rough)) * power
    # Rounding removes binary noise of multiples such as 3 × 0.1.
    places = 2 - math.floor(math.log10(step))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, places) + 0.0 for index in range(first, last + 1)]


def block_tones(blocks: Sequence[str]) -> dict[str, int]:
    """A colour number for each block, in order of appearance, so that neighbours differ.

    >>> block_tones(["stem", "layer1", "layer1", "fc"])
    {'stem': 0, 'layer1': 1, 'fc': 2}
    """
    return {block: index % TONES for index, block in enumerate(dict.fromkeys(blocks))}


def bar_plot(
    bars: Sequence[Bar],
    *,
    title: str,
    highest: float | None = None,
    compact: bool = False,
) -> Html:
    """Bars in order, coloured by block, with a line across them at 1, which is uniform.

    `highest` is the end of the axis (default: the highest bar). A `compact` plot fits beside another one and names
    its bars by tooltips only.

    >>> plot = bar_plot([Bar(0.5, "conv"), Bar(1.5, "fc")], title="w")
    >>> plot.count('<rect class="mark-bar')
    2
    """
    if not bars:
        raise UndeError("a bar plot needs at least one bar")
    blocks = any(bar.block for bar in bars)
    labelled = len(bars) <= _LABELLED_BARS and not compact
    longest = max(len(_shorten(bar.label)) for bar in bars)
    left, right = 40.0, len(_UNIFORM) * CHARACTER + 14
    slots = _COMPACT - left - right if compact else min(1100.0 - left - right, max(300.0, len(bars) * 26.0))
    width = left + slots + right
    top, plot_height = (46.0 if blocks else 22.0), (140.0 if compact else 190.0)
    height = top + plot_height + (longest * CHARACTER + 16 if labelled else 10)
    ceiling = max(1.0, *(bar.value for bar in bars)) if highest is None else highest
    frame = PlotFrame(left, left + slots, top, top + plot_height, (0, len(bars)), (0, ceiling * 1.02))
    tones = block_tones([bar.block for bar in bars])
    bars = _legible(bars, frame.x(1) - frame.x(0))
    return svg(
        width,
        height,
        title,
        "plot bars",
        grid_lines(frame),
        _block_heads(bars, frame, tones) if blocks else None,
        [_bar(bar, index, frame, tones[bar.block], labelled) for index, bar in enumerate(bars)],
        stroke("reference", frame.left, frame.y(1), frame.right, frame.y(1)),
        caption("reference-label", frame.right + 6, frame.y(1) + 4, _UNIFORM),
    )


def _legible(bars: Sequence[Bar], slot: float) -> list[Bar]:
    """Drop words above bars that would overlap those of a higher neighbour."""
    places: list[int] = []
    for index in sorted((i for i, bar in enumerate(bars) if bar.above), key=lambda i: -bars[i].value):
        if all(abs(index - other) * slot >= 1.5 * CHARACTER for other in places):
            places.append(index)
    return [replace(bar, above=bar.above if i in places else "") for i, bar in enumerate(bars)]


def _bar(bar: Bar, index: int, frame: PlotFrame, tone: int, labelled: bool) -> Html:
    slot = frame.x(1) - frame.x(0)
    width = min(slot * 0.78, 26.0)
    middle, end = frame.x(index + 0.5), frame.y(bar.value)
    label_y = frame.bottom + 8
    return el(
        "g.bar-group",
        el("title", bar.tooltip or f"{bar.label}: {number(bar.value)}"),
        # The whole column answers to the pointer, so that short bars have a tooltip too.
        rect("hover", frame.x(index), frame.top, slot, frame.bottom - frame.top),
        rect(f"mark-bar tone-{tone}", middle - width / 2, end, width, frame.bottom - end),
        caption("above", middle, end - 5, bar.above, anchor="middle") if bar.above else None,
        caption("bar-label", middle + 4, label_y, _shorten(bar.label), anchor="end", turned=True)
        if labelled
        else None,
    )


def _block_heads(bars: Sequence[Bar], frame: PlotFrame, tones: dict[str, int]) -> Iterator[Html]:
    """A coloured rule with the block's name over each run of bars of one block."""
    start = 0
    for block, run in itertools.groupby(bars, key=lambda bar: bar.block):
        stop = start + len(list(run))
        left, right = frame.x(start), frame.x(stop)
        if start:
            yield stroke("divider", left, 14, left, frame.bottom)
        yield rect(f"tone-{tones[block]}", left + 1, 20, max(right - left - 2, 0.5), 4)
        if len(block) * CHARACTER <= right - left:
            yield caption("block-label", (left + right) / 2, 13, block, anchor="middle")
        start = stop


def line_plot(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    diagonal: bool = False,
    size: tuple[float, float] = (400, 270),
) -> Html:
    """Curves in one frame; ranges default to those of the data.

    >>> line_plot([Line("w", [0, 1], [2, 3])], title="t", x_label="x", y_label="y").count("<polyline")
    1
    """
    if not lines:
        raise UndeError("a line plot needs at least one curve")
    width, height = size
    x_range = x_range or _extent([line.x for line in lines], pad=0.0)
    y_range = y_range or _extent([line.y for line in lines], pad=0.06)
    y_ticks = ticks(*y_range)
    left = 30 + max(len(number(tick)) for tick in y_ticks) * CHARACTER
    frame = PlotFrame(left, width - 12, 10, height - 42, x_range, y_range)
    return svg(
        width,
        height,
        title,
        "plot lines",
        grid_lines(frame, y_ticks),
        [
            caption("tick", frame.x(tick), frame.bottom + 17, number(tick), anchor="middle")
            for tick in ticks(*x_range)
        ],
        stroke("axis", frame.left, frame.bottom, frame.right, frame.bottom),
        caption("axis-label", (frame.left + frame.right) / 2, height - 6, x_label, anchor="middle"),
        caption("axis-label", 12, (frame.top + frame.bottom) / 2, y_label, anchor="middle", turned=True),
        stroke("diagonal", frame.left, frame.bottom, frame.right, frame.top) if diagonal else None,
        [_curve(line, index, frame) for index, line in enumerate(lines)],
    )


def curve_key(values: Sequence[tuple[str, str]]) -> Html:
    """The names of curves with a number for each, and a sample of their strokes where there are several."""
    return terms(
        "areas",
        [([_sample(i) if values[1:] else None, name], value) for i, (name, value) in enumerate(values)],
    )


def _sample(index: int) -> Html:
    line = stroke(f"curve.line-{index % 3}", 1, 5, 27, 5)
    return el("svg.key", line, viewBox="0 0 28 10", width=28, height=10, aria_hidden="true")


def _curve(line: Line, index: int, frame: PlotFrame) -> Html:
    keep = np.unique(np.linspace(0, len(line.x) - 1, min(len(line.x), _MAX_POINTS)).round().astype(int))
    points = [(frame.x(float(line.x[at])), frame.y(float(line.y[at]))) for at in keep]
    if len(points) == 1:
        (x, y) = points[0]
        return dot(f"dot line-{index % 3}", x, y, 3)
    path = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
    return el(f"polyline.curve.line-{index % 3}", el("title", line.name), points=path)


def grid_lines(frame: PlotFrame, at: Sequence[float] | None = None) -> Iterator[Html]:
    """Horizontal lines with their values, at round numbers unless `at` names others."""
    for tick in ticks(*frame.y_range) if at is None else at:
        yield stroke("grid", frame.left, frame.y(tick), frame.right, frame.y(tick))
        yield caption("tick", frame.left - 7, frame.y(tick) + 4, number(tick), anchor="end")


def _extent(values: Sequence[Sequence[float] | np.ndarray], pad: float) -> tuple[float, float]:
    low = min(float(np.min(some)) for some in values)
    high = max(float(np.max(some)) for some in values)
    if high > low:
        return low - pad * (high - low), high + pad * (high - low)
    room = abs(low) * 0.1 or 0.5
    return low - room, high + room


def svg(width: float, height: float, title: str, kind: str, *children: Child) -> Html:
    """A picture with a label for screen readers."""
    w, h = _short(width), _short(height)
    return el(
        f"svg.{kind}", *children, role="img", aria_label=title, width=w, height=h, viewBox=f"0 0 {w} {h}"
    )


def stroke(kind: str, x1: float, y1: float, x2: float, y2: float) -> Html:
    return el(f"line.{kind}", x1=_short(x1), y1=_short(y1), x2=_short(x2), y2=_short(y2))


def caption(kind: str, x: float, y: float, words: str, anchor: str = "start", turned: bool = False) -> Html:
    turn = f"rotate(-90 {_short(x)} {_short(y)})" if turned else None
    return el(f"text.{kind}", words, text_anchor=anchor, x=_short(x), y=_short(y), transform=turn)


def rect(kind: str, x: float, y: float, width: float, height: float, tip: str = "") -> Html:
    """A rectangle; `tip` is its tooltip."""
    place = {"x": _short(x), "y": _short(y), "width": _short(width), "height": _short(height)}
    return el(f"rect.{kind}", el("title", tip) if tip else None, **place)


def dot(kind: str, x: float, y: float, radius: int) -> Html:
    return el(f"circle.{kind}", cx=_short(x), cy=_short(y), r=radius)


def _short(value: float) -> str:
    """Format a coordinate with two decimals at most, which keeps the page small."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _shorten(label: str) -> str:
    """Cut long names at their beginning: siblings differ at their end."""
    return label if len(label) <= _LONGEST_LABEL else "…" + label[1 - _LONGEST_LABEL :]
