"""Markup as values. Text is escaped unless it is `Html`, so that user text never becomes a tag."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    """Escape `value` for an element or a quoted attribute.

    >>> text("<b> & 'c'")
    '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    return Html(escape(_FORBIDDEN.sub("\ufffd", str(value)), quote=True))


def join(children: Child) -> Html:
    """Concatenate children: `Html` unchanged, other text escaped, None omitted, lists flattened."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, (str, int, float)):
        return text(children)
    return Html("".join(join(child) for child in children))


def el(name: str, attributes: Mapping[str, Attribute] | None = None, *children: Child) -> Html:
    """Write one element. An attribute that is None or False is omitted; True is written without a value.

    >>> el("p", {"class": "note", "hidden": None}, "2 < 3", el("br"))
    '<p class="note">2 &lt; 3<br></p>'
    """
    parts = [name]
    for key, value in (attributes or {}).items():
        if value is None or value is False:
            continue
        parts.append(key if value is True else f'{key}="{text(value)}"')
    opening = f"<{' '.join(parts)}>"
    if name in _VOID:
        return Html(opening)
    return Html(f"{opening}{join(children)}</{name}>")


def number(value: float, digits: int = 3) -> str:
    """Format a number: at most `digits` significant digits, a true minus sign, a short exponent.

    >>> number(0.012345), number(1.5e-7), number(-2)
    ('0.0123', '1.5e−7', '−2')
    """
    return _typeset(f"{value:.{digits}g}")


def score(value: float) -> str:
    """Format a score with its sign and exactly three digits, so that scores line up.

    >>> score(0.25), score(-1234.5), score(3.2e-7), score(0)
    ('+0.250', '−1.23e3', '+3.20e−7', '0')
    """
    return _typeset(f"{value:+#.3g}") if value else "0"


def _typeset(digits: str) -> str:
    digits = re.sub(r"e([+-])0*(\d)", lambda match: f"e{match[1].replace('+', '')}{match[2]}", digits)
    return digits.rstrip(".").replace("-", "−")


def mark(kind: str, sign: str, word: str, meaning: str) -> Html:
    """A small sign on an example: a symbol, a word and a tooltip, so that colour is never the only cue."""
    return el(
        "span",
        {"class": f"mark {kind}", "title": meaning},
        el("span", {"class": "sign", "aria-hidden": "true"}, sign),
        el("span", {"class": "word"}, word),
    )


def section(name: str, title: str, *children: Child, kind: str | None = None) -> Html:
    """A section of a page with its heading; `name` is its anchor."""
    heading = el("h2", {"id": f"{name}-title"}, title)
    return el("section", {"id": name, "class": kind, "aria-labelledby": f"{name}-title"}, heading, *children)


def note(words: str) -> Html | None:
    """A remark in small print; None without words."""
    return el("p", {"class": "note"}, words) if words else None


def lead(*children: Child) -> Html:
    """An introductory paragraph."""
    return el("p", {"class": "lead"}, *children)


def fold(summary: str, *children: Child) -> Html:
    """Content that opens on demand."""
    return el("details", {"class": "fold"}, el("summary", None, summary), *children)


def scroll(label: str, *children: Child, name: str = "div") -> Html:
    """A region that scrolls sideways where it is too wide, also by keyboard."""
    return el(name, {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": label}, *children)


def bar(share: float, tone: str = "") -> Html:
    """A horizontal bar, `share` of the width of its place."""
    length = el("i", {"style": f"width:{100 * share:.4g}%"})
    return el("span", {"class": f"bar {tone}".strip(), "aria-hidden": "true"}, length)


def table(heads: Child, rows: Child, caption: str = "", kind: str = "data") -> Html:
    """A table of head cells and of rows (`tr`)."""
    return el(
        "table",
        {"class": kind},
        el("caption", None, caption) if caption else None,
        el("thead", None, el("tr", None, heads)),
        el("tbody", None, rows),
    )


def terms(kind: str, rows: Iterable[tuple[Child, Child]]) -> Html:
    """A list of terms with their values."""
    return el("dl", {"class": kind}, [el("div", None, el("dt", None, t), el("dd", None, v)) for t, v in rows])


__all__ = [
    *(
        "Attribute",
        "Child",
        "Html",
        "bar",
        "el",
        "fold",
        "join",
        "lead",
        "mark",
        "note",
        "number",
        "score",
        "scroll",
    ),
    *("section", "table", "terms", "text"),
]
