"""The figure of growth: cost against size on logarithmic axes, a panel for each axis. Drawn for light and dark pages:
no background, and strokes of middle tones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from experiments.pages.figures import _line

TONES = ("#3f83c4", "#d9822b", "#4f9e68", "#c2577a", "#8a6fc0", "#9a8c3c")
GREY, FAINT = "#808890", "#80889055"
WIDE, HIGH, LEFT, TOP, COLUMNS = 232.0, 150.0, 52.0, 40.0, 3
TITLES = {"rank": "rank (ResNet-18)", "tokens": "tokens (GPT-2)", "width": "width (GPT-2)"}


def drawn(found: Mapping[str, Mapping[str, Any]]) -> str:
    names = dict.fromkeys(name for curves in found.values() for name, e in curves.items() if "seconds" in e)
    tones = {name: TONES[i % len(TONES)] for i, name in enumerate(names)}
    parts = [
        panel(
            TITLES.get(axis, axis),
            {name: (e["sizes"], e["seconds"]) for name, e in curves.items() if "seconds" in e},
            LEFT + (WIDE + LEFT + 10) * (number % COLUMNS),
            TOP + (HIGH + 112) * (number // COLUMNS),
            tones,
        )
        for number, (axis, curves) in enumerate(found.items())
    ]
    width = LEFT + (WIDE + LEFT + 10) * min(COLUMNS, len(found))
    height = TOP + (HIGH + 112) * -(-len(found) // COLUMNS) - 20
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, "<title>cost against size</title>", *parts, "</svg>\n"])


def panel(
    title: str,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    left: float,
    top: float,
    tones: Mapping[str, str],
) -> str:
    xs = [math.log10(x) for sizes, _ in curves.values() for x in sizes]
    ys = [math.log10(max(y, 1e-6)) for _, values in curves.values() for y in values]
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = min(ys) - 0.1, max(ys) + 0.1
    if y_high - y_low < 1.2:  # a flat curve looks flat
        middle = (y_low + y_high) / 2
        y_low, y_high = middle - 0.6, middle + 0.6

    def x(value: float) -> float:
        return left + WIDE * (math.log10(value) - x_low) / ((x_high - x_low) or 1)

    def y(value: float) -> float:
        return top + HIGH * (y_high - math.log10(max(value, 1e-6))) / (y_high - y_low)

    parts = [_text(left, top - 10, title, bold=True)]
    for power in range(math.ceil(y_low), math.floor(y_high) + 1):
        at = y(10.0**power)
        parts += [_line(left, at, left + WIDE, at, FAINT), _text(left - 6, at + 4, _seconds(power), "end")]
    for size in sorted({s for sizes, _ in curves.values() for s in sizes}):
        parts += [
            _line(x(size), top + HIGH, x(size), top + HIGH + 4, GREY),
            _text(x(size), top + HIGH + 16, _short(size), "middle"),
        ]
    parts.append(_line(left, top + HIGH, left + WIDE, top + HIGH, GREY))
    for number, (name, (sizes, values)) in enumerate(curves.items()):
        tone = tones[name]
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(sizes, values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{tone}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{tone}">'
            f"<title>{escape(name)}, {a:,}: {b:.3g} s</title></circle>"
            for a, b in zip(sizes, values)
        ]
        row = top + HIGH + 34 + 14 * number
        parts += [_line(left, row - 4, left + 16, row - 4, tone, 2), _text(left + 22, row, name)]
    return "\n".join(parts)


def _seconds(power: int) -> str:
    """
    >>> _seconds(-3), _seconds(0), _seconds(1)
    ('1 ms', '1 s', '10 s')
    """
    return f"{10**power} s" if power >= 0 else f"{10 ** (power + 3):g} ms"


def _short(size: float) -> str:
    """
    >>> _short(16_000), _short(64)
    ('16k', '64')
    """
    return f"{size / 1000:g}k" if size >= 1000 else f"{size:g}"


def _text(x: float, y: float, words: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{GREY}"{weight}>{escape(words)}</text>'
    )
