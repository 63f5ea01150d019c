"""HTML as values, escaped unless already `Html`; small tables that objects show in a notebook.

Tables of notebooks use no scripts or style sheets, and transparent colours for light and dark backgrounds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TypeAlias

# Characters that HTML forbids or that cannot be written as UTF-8; text from a tokenizer can hold them.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")
_VOID = frozenset({"br", "img", "input", "link", "meta", "wbr"})


class Html(str):
    """A string that is already markup and is not escaped again."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"
Attribute: TypeAlias = "str | int | float | bool | None"


def text(value: object) -> Html:
    """`value` as escaped text, safe in an element and in a quoted attribute.

    >>> text("<b> & 'c'")
    '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    return Html(escape(_FORBIDDEN.sub("\ufffd", str(value)), quote=True))


def join(children: Child) -> Html:
    """Children side by side: `Html` as it is, other text escaped, None left out, lists flattened."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, (str, int, float)):
        return text(children)
    return Html("".join(join(child) for child in children))


def el(tag: str, *children: Child, **attributes: Attribute) -> Html:
    """One element; classes follow its name, as in "p.note". An attribute that is None or False is left out.

    An attribute that is True is written bare. An underscore in the name of an attribute stands for a hyphen.

    >>> el("p.note", "2 < 3", el("br"), hidden=None, aria_label="so")
    '<p class="note" aria-label="so">2 &lt; 3<br></p>'
    """
    name, *classes = tag.replace(".", " ").split()
    parts = [name, f'class="{text(" ".join(classes))}"'] if classes else [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            word = key.replace("_", "-")
            parts.append(word if value is True else f'{word}="{text(value)}"')
    opening = f"<{' '.join(parts)}>"
    return Html(opening if name in _VOID else f"{opening}{join(children)}</{name}>")


def number(value: float, digits: int = 3) -> str:
    """A number for reading: at most `digits` significant digits, a true minus sign, a short exponent.

    >>> number(0.012345), number(1.5e-7), number(-2)
    ('0.0123', '1.5e−7', '−2')
    """
    return _typeset(f"{value:.{digits}g}")


def score(value: float) -> str:
    """A score for reading: its sign and exactly three digits, so that scores line up.

    >>> score(0.25), score(-1234.5), score(3.2e-7), score(0)
    ('+0.250', '−1.23e3', '+3.20e−7', '0')
    """
    return _typeset(f"{value:+#.3g}") if value else "0"


def _typeset(written: str) -> str:
    written = re.sub(r"e([+-])0*(\d)", lambda match: f"e{match[1].replace('+', '')}{match[2]}", written)
    return written.rstrip(".").replace("-", "−")


def mark(kind: str, sign: str, word: str, meaning: str) -> Html:
    """A small sign on an example: a symbol, a word and a tooltip, so that colour alone never speaks."""
    return el(
        f"span.mark.{kind}", el("span.sign", sign, aria_hidden="true"), el("span.word", word), title=meaning
    )


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
    head = el("tr", [el("th", c, style=f"{_CELL};{_LINE};font-weight:600") for c in columns])
    cells = [[el("td", c, style=_CELL) for c in row] for row in rows]
    body = [el("tr", row, style=f"{_LINE};background:transparent") for row in cells]
    whole = el("table", head if columns else None, body, style="border-collapse:collapse;margin:4px 0")
    return el(
        "div",
        el("div", title, style="font-weight:600"),
        whole,
        el("div", note, style=f"{_FAINT};font-size:90%") if note else None,
        style="color:inherit;background:transparent;max-width:60em",
    )


def facts(title: str, values: Mapping[str, Child]) -> Html:
    """Names with their values."""
    rows = [[el("span", name, style=_FAINT), value] for name, value in values.items()]
    return table(title, [], rows)


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
        shown or score(value),
        style="display:inline-block;min-width:4.5em;font-variant-numeric:tabular-nums",
    )
    return el("span", number, el("span", style=length), style="white-space:nowrap")


def interval(value: float, half: float, low: float, high: float) -> Html:
    """A mean and its interval on a line from `low` to `high`."""
    width, scale = 160, (high - low) or 1.0
    at, start, stop = (
        width * (min(max(x, low), high) - low) / scale for x in (value, value - half, value + half)
    )
    line = "position:absolute;background:currentColor"
    return el(
        "span",
        el("span", style=f"{line};opacity:.3;left:0;width:100%;top:48%;height:1px"),
        el(
            "span",
            style=f"{line};opacity:.6;left:{start:.4g}px;width:{stop - start:.4g}px;top:40%;height:3px",
        ),
        el("span", style=f"{line};left:{at - 1:.4g}px;width:3px;top:15%;height:70%"),
        style=f"display:inline-block;position:relative;width:{width}px;height:1em",
        aria_hidden="true",
    )


def brief(text: str) -> str:
    """A text in one line.

    >>> brief("to be\\n or not")
    'to be or not'
    """
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 2]} …"


def list_names(names: Sequence[str], most: int = 6) -> str:
    """Some names, and how many they are.

    >>> list_names(["a", "b", "c"], most=2)
    '3: a, b, …'
    """
    return f"{len(names):,}: {', '.join(names[:most])}{', …' if len(names) > most else ''}"
