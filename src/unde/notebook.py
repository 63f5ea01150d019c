"""What objects look like in a notebook: small tables of their own, without scripts or style sheets.

All colours are the text's own with some transparency, so that they can be read on light and on dark ground.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unde.markup import Child, Html, el, score

_LONGEST = 160  # characters of a text in a cell
_CELL = "padding:2px 8px;text-align:left;vertical-align:top"
_LINE = "border:0;border-bottom:1px solid rgba(128,128,128,.35)"
_FAINT = "opacity:.65"
_TONES = ("rgba(31,119,180,.75)", "rgba(214,100,39,.8)")  # proponents, opponents
BARS = 12  # rows of bars that are shown


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Child]], note: str = "") -> Html:
    """A small table below a title.

    >>> "&lt;b&gt;</td>" in table("Top", ["id"], [["<b>"]])
    True
    """
    head = el("tr", None, [el("th", {"style": f"{_CELL};{_LINE};font-weight:600"}, c) for c in columns])
    body = [el("tr", {"style": f"{_LINE};background:transparent"}, [_cell(c) for c in row]) for row in rows]
    whole = el("table", {"style": "border-collapse:collapse;margin:4px 0"}, head if columns else None, body)
    return _framed(title, whole, note)


def facts(title: str, found: Mapping[str, Child], note: str = "") -> Html:
    """Names and what they are."""
    return table(
        title, [], [[el("span", {"style": _FAINT}, name), value] for name, value in found.items()], note
    )


def bars(title: str, values: Mapping[str, float], note: str = "") -> Html:
    """The largest of some numbers ≥ 0, each with a bar."""
    ordered = sorted(values.items(), key=lambda item: -item[1])
    largest, rest = ordered[0][1], len(ordered) - BARS
    rows = [[name, bar(value, largest, f"{value:.3f}")] for name, value in ordered[:BARS]]
    more = f"and {rest:,} more" if rest > 0 else ""
    return table(title, [], rows, ", ".join(filter(None, (more, note))))


def bar(value: float, largest: float, shown: str = "") -> Html:
    """A number with a bar as long as its share of the largest; its sign is also in its colour."""
    share = min(1.0, abs(value) / largest) if largest > 0 else 0.0
    colour = _TONES[value < 0]
    length = f"display:inline-block;height:.6em;width:{80 * share:.3g}px;background:{colour}"
    number = el(
        "span",
        {"style": "display:inline-block;min-width:4.5em;font-variant-numeric:tabular-nums"},
        shown or score(value),
    )
    return el("span", {"style": "white-space:nowrap"}, number, el("span", {"style": length}))


def interval(value: float, half: float, low: float, high: float) -> Html:
    """A mean and its interval on a line from `low` to `high`."""
    width, scale = 160, (high - low) or 1.0
    at, start, stop = (
        width * (min(max(x, low), high) - low) / scale for x in (value, value - half, value + half)
    )
    line = "position:absolute;background:currentColor"
    return el(
        "span",
        {
            "style": f"display:inline-block;position:relative;width:{width}px;height:1em",
            "aria-hidden": "true",
        },
        el("span", {"style": f"{line};opacity:.3;left:0;width:100%;top:48%;height:1px"}),
        el(
            "span",
            {"style": f"{line};opacity:.6;left:{start:.4g}px;width:{stop - start:.4g}px;top:40%;height:3px"},
        ),
        el("span", {"style": f"{line};left:{at - 1:.4g}px;width:3px;top:15%;height:70%"}),
    )


def brief(text: str) -> str:
    """A text in one line.

    >>> brief("to be\\n or not")
    'to be or not'
    """
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 2]} …"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Some names, and how many they are.

    >>> listed(["a", "b", "c"], most=2)
    '3: a, b, …'
    """
    return f"{len(names):,}: {', '.join(names[:most])}{', …' if len(names) > most else ''}"


def _cell(content: Child) -> Html:
    return el("td", {"style": _CELL}, content)


def _framed(title: str, content: Html, note: str) -> Html:
    return el(
        "div",
        {"style": "color:inherit;background:transparent;max-width:60em"},
        el("div", {"style": "font-weight:600"}, title),
        content,
        el("div", {"style": f"{_FAINT};font-size:90%"}, note) if note else None,
    )
