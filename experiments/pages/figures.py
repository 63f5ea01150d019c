"""Figures of the page as plain SVG files: bars, intervals, heat maps and lines. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from types import MappingProxyType

from unde.ui.report.svg import ticks

TONES = ("#4878a8", "#d9822b", "#5a9e6f", "#b4556e", "#8a6fb0", "#8c8c5a")
GREY, INK, GRID, PAPER = "#8a8a8a", "#222222", "#e4e4e4", "#ffffff"
_LETTER = 6.0  # width of a letter of 11 px, generously
Interval = tuple[float, float]  # mean, half width
Point = tuple[float, float, str]  # x, y, what it is


def bars(
    values: Mapping[str, float],
    *,
    title: str,
    unit: str,
    block_of: Mapping[str, str] | None = None,
    halves: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """A bar for each name, up or down from zero, coloured by block; few bars are named, many have their block named.

    `halves` are half widths of intervals, drawn on the bars.
    """
    block_of = block_of or dict.fromkeys(values, "")
    blocks = list(dict.fromkeys(block_of[name] for name in values))
    tone = {block: TONES[i % len(TONES)] for i, block in enumerate(blocks)}
    named = len(values) <= 24
    slot = max(4.0, min(34.0, 860.0 / len(values)))
    below = max(len(name) for name in values) * _LETTER + 12 if named else 14.0
    legend = [] if named else blocks
    left, top, high = 46.0, 26.0 + 16 * -(-len(legend) // 5), 150.0
    width, height = left + slot * len(values) + 10, top + high + below
    width = max(width, 420.0)
    ends = [v + s * halves.get(name, 0.0) for name, v in values.items() for s in (-1, 1)]
    low, peak = min(0.0, *ends), max(0.0, *ends)
    span = (peak - low) or 1.0

    def y(value: float) -> float:
        return top + high * (peak - value) / span

    parts = [_text(left, 14, title)]
    for i, block in enumerate(legend):
        x, row = left + (i % 5) * 165, 30 + 16 * (i // 5)
        parts += [_box(x, row - 8, 9, 9, tone[block]), _text(x + 13, row, block, size=10)]
    for tick in ticks(low, peak):
        parts += [
            _line(left, y(tick), width - 10, y(tick), GRID),
            _text(left - 6, y(tick) + 4, f"{tick:g}", "end"),
        ]
    for i, (name, value) in enumerate(values.items()):
        x, ends = left + slot * i, sorted((y(0), y(value)))
        half = halves.get(name)
        note = f"{name}: {value:.2f}{'' if half is None else f' ± {half:.2f}'} {unit}"
        parts.append(_box(x + slot * 0.1, ends[0], slot * 0.8, ends[1] - ends[0], tone[block_of[name]], note))
        if half is not None:
            middle = x + slot / 2
            parts.append(_line(middle, y(value - half), middle, y(value + half), INK))
        if named:
            parts.append(_text(x + slot / 2 + 4, top + high + 8, name, "end", turned=True))
    parts.append(_line(left, y(0), width - 10, y(0), INK))
    return _svg(width, height, title, parts)


def intervals(
    rows: Sequence[tuple[str, Mapping[str, Interval]]], *, title: str, unit: str, series: Sequence[str]
) -> str:
    """A row for each name with one dot and its interval for each series; a row without dots is a heading."""
    left = max(len(name) for name, _ in rows) * _LETTER + 16
    plot, pitch, top = 520.0, 20.0, 50.0
    ends = [m + s * w for _, found in rows for m, w in found.values() for s in (-1, 1)] or [0.0]
    low, peak = min(0.0, *ends), max(0.0, *ends)
    span = (peak - low) or 1.0
    width, height = left + plot + 20, top + pitch * len(rows) + 34

    def x(value: float) -> float:
        return left + plot * (value - low) / span

    parts = [_text(8, 14, title)]
    at = 14.0
    for i, name in enumerate(series):
        parts += [_dot(at, 30, TONES[i]), _text(at + 8, 34, name)]
        at += len(name) * _LETTER + 30
    bottom = top + pitch * len(rows)
    for tick in ticks(low, peak, 6):
        parts += [
            _line(x(tick), top - 6, x(tick), bottom, GRID),
            _text(x(tick), bottom + 14, f"{tick:g}", "middle"),
        ]
    parts += [_line(x(0), top - 6, x(0), bottom, INK), _text(left + plot / 2, bottom + 30, unit, "middle")]
    for i, (name, found) in enumerate(rows):
        middle = top + pitch * (i + 0.5)
        parts.append(_text(left - 8, middle + 4, name, "end", bold=not found))
        for number, label in enumerate(series):
            if label in found:
                (mean, half), at = found[label], middle + 6 * (number - (len(series) - 1) / 2)
                note = f"{name}, {label}: {mean:+.2f} ± {half:.2f}"
                parts.append(_line(x(mean - half), at, x(mean + half), at, TONES[number], 1.6))
                parts.append(_dot(x(mean), at, TONES[number], note))
    return _svg(width, height, title, parts)


def heat(
    maps: Mapping[str, tuple[Sequence[str], Sequence[str], Sequence[Sequence[float | None]]]],
    *,
    title: str,
    digits: int = 0,
) -> str:
    """Heat maps side by side under one scale; None is a cell that does not exist."""
    wide, high = 40.0, 24.0
    values = [v for _, _, rows in maps.values() for row in rows for v in row if v is not None]
    low, peak = min(values), max(values)
    above = max(len(c) for _, columns, _ in maps.values() for c in columns) * _LETTER + 44
    parts, at, deepest = [_text(8, 14, title)], 8.0, 0.0
    for name, (rows, columns, table) in maps.items():
        left = at + max(map(len, rows)) * _LETTER + 8
        parts.append(_text(left, 34, name, bold=True))
        for c, column in enumerate(columns):
            parts.append(_text(left + wide * (c + 0.5) + 4, above - 4, column, turned=True))
        for r, row in enumerate(rows):
            y = above + high * r
            parts.append(_text(left - 6, y + 16, row, "end"))
            for c, value in enumerate(table[r]):
                x = left + wide * c
                if value is None:
                    parts.append(_text(x + wide / 2, y + 16, "–", "middle", colour=GREY))
                    continue
                share = (value - low) / ((peak - low) or 1.0)
                words = f"{value:.{digits}f}"
                parts.append(
                    _box(x + 1, y + 1, wide - 2, high - 2, _shade(share), f"{row}, {columns[c]}: {words}")
                )
                parts.append(
                    _text(
                        x + wide / 2, y + 16, words, "middle", colour=INK if share > 0.55 else PAPER, size=10
                    )
                )
        at = left + wide * len(columns) + 18
        deepest = max(deepest, above + high * len(rows))
    return _svg(max(at, 8 + len(title) * _LETTER), deepest + 8, title, parts)


def lines(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    at: Sequence[str],
    *,
    title: str,
    x_label: str,
    flat: Mapping[str, Mapping[str, float]] | None = None,
) -> str:
    """{panel: {curve: values}} at named places; `flat` are dashed levels of the same colours."""
    flat, wide, high, top = flat or {}, 250.0, 150.0, 62.0
    curves = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    tone = {name: TONES[i % len(TONES)] for i, name in enumerate(curves)}
    parts = [_text(8, 14, title)]
    for i, name in enumerate(curves):
        parts += [_box(10 + 120 * i, 24, 9, 9, tone[name]), _text(23 + 120 * i, 33, name)]
    columns = 3
    for number, (panel, found) in enumerate(panels.items()):
        left = 44 + (wide + 56) * (number % columns)
        base = top + (high + 66) * (number // columns)
        levels = flat.get(panel, {})
        values = [v for ys in found.values() for v in ys] + list(levels.values())
        low, peak = min(values), max(values)
        pad = 0.05 * ((peak - low) or 1.0)
        low, peak = low - pad, peak + pad

        def y(value: float, base=base, low=low, peak=peak) -> float:
            return base + high * (peak - value) / (peak - low)

        def x(i: int, left=left) -> float:
            return left + wide * (i + 0.5) / len(at)

        parts.append(_text(left, base - 8, panel, bold=True))
        for tick in ticks(low, peak):
            parts += [
                _line(left, y(tick), left + wide, y(tick), GRID),
                _text(left - 5, y(tick) + 4, f"{tick:g}", "end"),
            ]
        parts += [_text(x(i), base + high + 14, name, "middle") for i, name in enumerate(at)]
        parts.append(_text(left + wide / 2, base + high + 30, x_label, "middle"))
        for name, level in levels.items():
            parts.append(_line(left, y(level), left + wide, y(level), tone.get(name, GREY), 1.0, dashed=True))
        for name, ys in found.items():
            points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(ys))
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{tone[name]}" stroke-width="1.8"/>'
            )
    rows = -(-len(panels) // columns)
    width = max(60 + (wide + 56) * min(columns, len(panels)), 30 + 120 * len(curves))
    return _svg(width, top + (high + 66) * rows, title, parts)


def against(
    series: Mapping[str, Sequence[Sequence[Point]]],
    others: Sequence[Point],
    *,
    title: str,
    words: Callable[[float], str],
) -> str:
    """Points over a logarithmic axis whose ticks are in `words`, joined by lines of which the first of each series is
    dashed; `others` stand alone and are named."""
    left, top, wide, high = 46.0, 30.0, 620.0, 330.0
    every = [point for paths in series.values() for path in paths for point in path] + list(others)
    low, far = min(x for x, _, _ in every) / 1.3, max(x for x, _, _ in every) * 1.3
    least, most = min(0.0, *(y for _, y, _ in every)), 1.06 * max(y for _, y, _ in every)

    def x(value: float) -> float:
        return left + wide * math.log(value / low) / math.log(far / low)

    def y(value: float) -> float:
        return top + high * (most - value) / (most - least)

    parts = [_text(8, 14, title)]
    for tick in ticks(least, most):
        parts += [
            _line(left, y(tick), left + wide, y(tick), GRID),
            _text(left - 6, y(tick) + 4, f"{tick:g}", "end"),
        ]
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(far)) + 1):
        at = x(10.0**power)
        parts += [
            _line(at, top, at, top + high, GRID),
            _text(at, top + high + 16, words(10.0**power), "middle"),
        ]
    for i, (name, paths) in enumerate(series.items()):
        tone, height = (*TONES, INK)[i % (len(TONES) + 1)], top + 16 * i
        parts += [_dot(left + wide + 16, height, tone), _text(left + wide + 26, height + 4, name)]
        for path in paths:
            for (a, b, _), (c, d, _) in zip(path, path[1:]):
                parts.append(_line(x(a), y(b), x(c), y(d), tone, 1.6, dashed=path is paths[0]))
            for a, b, note in path:
                parts.append(_dot(x(a), y(b), tone, f"{name}, {note}: {b:.1f} at {words(a)}"))
    for i, (a, b, note) in enumerate(others):
        crowded = any(abs(y(b) - y(d)) < 12 and abs(x(a) - x(c)) < 120 for c, d, _ in others[:i])
        parts += [
            _box(x(a) - 4, y(b) - 4, 8, 8, GREY, f"{b:.1f} at {words(a)}"),
            _text(x(a) + 7, y(b) + (-8 if crowded else 4), note),
        ]
    return _svg(left + wide + 26 + max(map(len, series)) * _LETTER, top + high + 26, title, parts)


def _shade(share: float) -> str:
    """From dark blue over green to yellow."""
    stops = ((68, 1, 84), (33, 145, 140), (253, 231, 37))
    low, high, part = (stops[0], stops[1], 2 * share) if share < 0.5 else (stops[1], stops[2], 2 * share - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high))


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", _box(0, 0, width, height, PAPER), *parts, "</svg>\n"]
    )


def _text(
    x: float, y: float, words: str, anchor: str = "start", *, turned: bool = False, bold: bool = False,
    colour: str = INK, size: int = 11,
) -> str:  # fmt: skip
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"'
    return f"<text {place}{weight}{turn}>{escape(words)}</text>"


def _box(x: float, y: float, width: float, height: float, colour: str, note: str = "") -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"'
    return f"<rect {size}><title>{escape(note)}</title></rect>" if note else f"<rect {size}/>"


def _dot(x: float, y: float, colour: str, note: str = "") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"><title>{escape(note)}</title></circle>'


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0, dashed: bool = False
) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"{dash}/>'
