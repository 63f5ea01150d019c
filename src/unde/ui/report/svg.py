"""Small plots as inline SVG: a bar for each group, and lines. Colours are classes that the style sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unde.errors import UndeError
from unde.markup import Child, Html, el, number

TONES = 6  # colours that blocks cycle through: .tone-0 … .tone-5 in the style
_LABELLED_BARS = 64  # up to here every bar carries its name; beyond, blocks and tooltips do
_CHARACTER = 6.3  # width of a character of the plots' 11 px text, generously
_LONGEST_LABEL = 30
_COMPACT = 540.0  # width of a plot that stands beside another one
HEATS = 10  # shades of a heat map: .heat-0 … .heat-9 in the style
_CELL = (34.0, 26.0)
_MAX_POINTS = 600  # a curve drawn a few hundred pixels wide needs no more


@dataclass(frozen=True)
class Bar:
    """One bar: its value, name, tooltip, the block it belongs to and a word above it (such as its rank)."""

    value: float
    label: str
    tooltip: str = ""
    block: str = ""
    above: str = ""


@dataclass(frozen=True, eq=False)
class Line:
    """One curve, by its points; `low` and `high`, if given, bound a band around it."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    low: Sequence[float] | np.ndarray | None = None
    high: Sequence[float] | np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not len(self.x):
            raise UndeError(
                f"the curve {self.name!r} has {len(self.x)} x and {len(self.y)} y values: "
                "expected as many of the one as of the other, and at least one"
            )


@dataclass(frozen=True)
class _Frame:
    """The plotting area inside the picture, and the way from data to it."""

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


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers inside [low, high], about `wanted` of them.

    >>> ticks(0, 1), ticks(0, 7.3), ticks(-0.021, -0.013)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 2.0, 4.0, 6.0], [-0.02, -0.018, -0.016, -0.014])
    """
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * power - rough)) * power
    # Rounding hides the binary dust of multiples such as 3 × 0.1.
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
    reference: float,
    reference_label: str,
    highest: float | None = None,
    compact: bool = False,
) -> Html:
    """Bars from zero in their given order, coloured by block, with a reference line across them.

    `highest` ends the axis, by default at the highest bar. A `compact` plot fits beside another one; its bars are
    named by their tooltips only.

    >>> plot = bar_plot([Bar(0.5, "conv"), Bar(1.5, "fc")], title="w", reference=1, reference_label="one")
    >>> plot.count('<rect class="mark-bar')
    2
    """
    if not bars:
        raise UndeError("a bar plot needs at least one bar")
    blocks = any(bar.block for bar in bars)
    labelled = len(bars) <= _LABELLED_BARS and not compact
    longest = max(len(_shorten(bar.label)) for bar in bars)
    left, right = 40.0, len(reference_label) * _CHARACTER + 14
    slots = _COMPACT - left - right if compact else min(1100.0 - left - right, max(300.0, len(bars) * 26.0))
    width = left + slots + right
    top, plot_height = (46.0 if blocks else 22.0), (140.0 if compact else 190.0)
    height = top + plot_height + (longest * _CHARACTER + 16 if labelled else 10)
    ceiling = max(reference, *(bar.value for bar in bars)) if highest is None else highest
    frame = _Frame(left, left + slots, top, top + plot_height, (0, len(bars)), (0, ceiling * 1.02))
    tones = block_tones([bar.block for bar in bars])
    bars = _legible(bars, frame.x(1) - frame.x(0))
    return _svg(
        width,
        height,
        title,
        "plot bars",
        _horizontal_grid(frame),
        _block_heads(bars, frame, tones) if blocks else None,
        [_bar(bar, index, frame, tones[bar.block], labelled) for index, bar in enumerate(bars)],
        _line_element("reference", frame.left, frame.y(reference), frame.right, frame.y(reference)),
        _text("reference-label", frame.right + 6, frame.y(reference) + 4, reference_label),
    )


def _legible(bars: Sequence[Bar], slot: float) -> list[Bar]:
    """Of words above neighbouring bars that would run into each other, only that of the highest bar."""
    kept: list[int] = []
    for index in sorted((i for i, bar in enumerate(bars) if bar.above), key=lambda i: -bars[i].value):
        if all(abs(index - other) * slot >= 1.5 * _CHARACTER for other in kept):
            kept.append(index)
    return [replace(bar, above=bar.above if i in kept else "") for i, bar in enumerate(bars)]


def _bar(bar: Bar, index: int, frame: _Frame, tone: int, labelled: bool) -> Html:
    slot = frame.x(1) - frame.x(0)
    width = min(slot * 0.78, 26.0)
    middle, end = frame.x(index + 0.5), frame.y(bar.value)
    label_y = frame.bottom + 8
    return el(
        "g",
        {"class": "bar-group"},
        el("title", None, bar.tooltip or f"{bar.label}: {number(bar.value)}"),
        # The whole column answers to the pointer, so that short bars have a tooltip too.
        el("rect", {"class": "hover", **_box(frame.x(index), frame.top, slot, frame.bottom - frame.top)}),
        el(
            "rect",
            {"class": f"mark-bar tone-{tone}", **_box(middle - width / 2, end, width, frame.bottom - end)},
        ),
        _text("above", middle, end - 5, bar.above, anchor="middle") if bar.above else None,
        _text("bar-label", middle + 4, label_y, _shorten(bar.label), anchor="end", turned=True)
        if labelled
        else None,
    )


def _block_heads(bars: Sequence[Bar], frame: _Frame, tones: dict[str, int]) -> Iterator[Html]:
    """A coloured rule with the block's name over each run of bars of one block."""
    start = 0
    for block, run in itertools.groupby(bars, key=lambda bar: bar.block):
        stop = start + len(list(run))
        left, right = frame.x(start), frame.x(stop)
        if start:
            yield _line_element("divider", left, 14, left, frame.bottom)
        yield el(
            "rect", {"class": f"tone-{tones[block]}", **_box(left + 1, 20, max(right - left - 2, 0.5), 4)}
        )
        if len(block) * _CHARACTER <= right - left:
            yield _text("block-label", (left + right) / 2, 13, block, anchor="middle")
        start = stop


def line_plot(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    diagonal: bool = False,
    size: tuple[float, float] = (400, 270),
) -> Html:
    """Curves in one frame; ranges and the ticks of x are the data's unless they are given.

    >>> line_plot([Line("w", [0, 1], [2, 3])], title="t", x_label="x", y_label="y").count("<polyline")
    1
    """
    if not lines:
        raise UndeError("a line plot needs at least one curve")
    width, height = size
    x_range = x_range or _extent([line.x for line in lines], pad=0.0)
    y_range = y_range or _extent([line.y for line in lines], pad=0.06)
    y_ticks = ticks(*y_range)
    left = 30 + max(len(number(tick)) for tick in y_ticks) * _CHARACTER
    frame = _Frame(left, width - 12, 10, height - 42, x_range, y_range)
    return _svg(
        width,
        height,
        title,
        "plot lines",
        _horizontal_grid(frame, y_ticks),
        [
            _text("tick", frame.x(tick), frame.bottom + 17, name, anchor="middle")
            for tick, name in x_ticks or [(tick, number(tick)) for tick in ticks(*x_range)]
        ],
        _line_element("axis", frame.left, frame.bottom, frame.right, frame.bottom),
        _text("axis-label", (frame.left + frame.right) / 2, height - 6, x_label, anchor="middle"),
        _text("axis-label", 12, (frame.top + frame.bottom) / 2, y_label, anchor="middle", turned=True),
        _line_element("diagonal", frame.left, frame.bottom, frame.right, frame.top) if diagonal else None,
        [_band(line, index, frame) for index, line in enumerate(lines)],
        [_curve(line, index, frame) for index, line in enumerate(lines)],
    )


def roc_plot(lines: Sequence[Line], *, title: str) -> Html:
    """ROC curves in the unit square: false-positive rate across, true-positive rate up, chance dotted."""
    unit = (0.0, 1.0)
    return line_plot(
        lines,
        title=title,
        x_label="false-positive rate",
        y_label="true-positive rate",
        x_range=unit,
        y_range=unit,
        diagonal=True,
        size=(370, 370),
    )


def heat_map(
    values: np.ndarray, rows: Sequence[str], columns: Sequence[str], *, title: str, top: float
) -> Html:
    """Cells with their values in per cent, shaded from 0 to `top`; NaN is a cell that does not exist.

    >>> heat_map(np.array([[0.5, np.nan]]), ["mid"], ["q", "k"], title="t", top=1.0).count('class="heat-')
    1
    """
    width, height = _CELL
    row_names, column_names = [_shorten(name) for name in rows], [_shorten(name) for name in columns]
    left = max(map(len, row_names)) * _CHARACTER + 10
    above = max(map(len, column_names)) * _CHARACTER + 10
    places = [(r, c) for r in range(len(rows)) for c in range(len(columns))]
    return _svg(
        left + width * len(columns) + 2,
        above + height * len(rows) + 2,
        title,
        "plot heat",
        [
            _text("cell-label", left + (c + 0.5) * width + 4, above - 8, name, turned=True)
            for c, name in enumerate(column_names)
        ],
        [
            _text("cell-label", left - 8, above + (r + 0.5) * height + 4, name, anchor="end")
            for r, name in enumerate(row_names)
        ],
        [
            _cell(float(values[r, c]), left + c * width, above + r * height, f"{rows[r]}, {columns[c]}", top)
            for r, c in places
        ],
    )


def _cell(value: float, x: float, y: float, name: str, top: float) -> Html:
    width, height = _CELL
    middle, base = x + width / 2, y + height / 2 + 4
    if math.isnan(value):
        return el("g", None, el("title", None, f"{name}: none"), _text("none", middle, base, "–", "middle"))
    level = min(HEATS - 1, int(HEATS * value / top))
    return el(
        "g",
        None,
        el("title", None, f"{name}: {number(100 * value)} %"),
        el("rect", {"class": f"heat-{level}", **_box(x + 1, y + 1, width - 2, height - 2), "rx": 3}),
        _text(
            "cool" if level < HEATS // 2 else "hot",
            middle,
            base,
            f"{100 * value:.{0 if top > 0.1 else 1}f}",
            "middle",
        ),
    )


def line_key(index: int) -> Html:
    """A sample of the stroke of the curve with this index, for a legend in the text."""
    return el(
        "svg",
        {"class": "key", "viewBox": "0 0 28 10", "width": 28, "height": 10, "aria-hidden": "true"},
        _line_element(f"curve line-{index % 3}", 1, 5, 27, 5),
    )


def _curve(line: Line, index: int, frame: _Frame) -> Html:
    keep = np.unique(np.linspace(0, len(line.x) - 1, min(len(line.x), _MAX_POINTS)).round().astype(int))
    points = [(frame.x(float(line.x[at])), frame.y(float(line.y[at]))) for at in keep]
    if len(points) == 1:
        (x, y) = points[0]
        return el("circle", {"class": f"dot line-{index % 3}", "cx": _short(x), "cy": _short(y), "r": 3})
    path = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
    return el("polyline", {"class": f"curve line-{index % 3}", "points": path}, el("title", None, line.name))


def _band(line: Line, index: int, frame: _Frame) -> Html | None:
    if line.low is None or line.high is None:
        return None
    ends = [*zip(line.x, line.low), *reversed([*zip(line.x, line.high)])]
    path = " ".join(f"{_short(frame.x(float(x)))},{_short(frame.y(float(y)))}" for x, y in ends)
    return el("polygon", {"class": f"band band-{index % 3}", "points": path})


def _horizontal_grid(frame: _Frame, at: Sequence[float] | None = None) -> Iterator[Html]:
    for tick in ticks(*frame.y_range) if at is None else at:
        yield _line_element("grid", frame.left, frame.y(tick), frame.right, frame.y(tick))
        yield _text("tick", frame.left - 7, frame.y(tick) + 4, number(tick), anchor="end")


def _extent(values: Sequence[Sequence[float] | np.ndarray], pad: float) -> tuple[float, float]:
    low = min(float(np.min(some)) for some in values)
    high = max(float(np.max(some)) for some in values)
    if high > low:
        return low - pad * (high - low), high + pad * (high - low)
    room = abs(low) * 0.1 or 0.5
    return low - room, high + room


def _svg(width: float, height: float, title: str, kind: str, *children: Child) -> Html:
    size = {
        "width": _short(width),
        "height": _short(height),
        "viewBox": f"0 0 {_short(width)} {_short(height)}",
    }
    return el("svg", {"class": kind, "role": "img", "aria-label": title, **size}, *children)


def _line_element(kind: str, x1: float, y1: float, x2: float, y2: float) -> Html:
    ends = {"x1": _short(x1), "y1": _short(y1), "x2": _short(x2), "y2": _short(y2)}
    return el("line", {"class": kind, **ends})


def _text(kind: str, x: float, y: float, words: str, anchor: str = "start", turned: bool = False) -> Html:
    place: dict[str, str] = {"x": _short(x), "y": _short(y)}
    if turned:
        place["transform"] = f"rotate(-90 {_short(x)} {_short(y)})"
    return el("text", {"class": kind, "text-anchor": anchor, **place}, words)


def _box(x: float, y: float, width: float, height: float) -> dict[str, str]:
    return {"x": _short(x), "y": _short(y), "width": _short(width), "height": _short(height)}


def _short(value: float) -> str:
    """A coordinate with two decimals at most: finer is invisible and only makes the page larger."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _shorten(label: str) -> str:
    """Long names keep their end, which tells siblings apart."""
    return label if len(label) <= _LONGEST_LABEL else "…" + label[1 - _LONGEST_LABEL :]
