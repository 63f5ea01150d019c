"""Markup as values: text is escaped unless it is already `Html`, so nothing a user wrote becomes a tag."""

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


def el(name: str, attributes: Mapping[str, Attribute] | None = None, *children: Child) -> Html:
    """One element. An attribute that is None or False is left out; True is written bare.

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
    written = re.sub(r"e([+-])0*(\d)", lambda found: f"e{found[1].replace('+', '')}{found[2]}", written)
    return written.rstrip(".").replace("-", "−")


__all__ = ["Attribute", "Child", "Html", "el", "join", "mark", "number", "score", "text"]


def mark(kind: str, sign: str, word: str, meaning: str) -> Html:
    """A small sign on an example: a symbol, a word and a tooltip, so that colour alone never speaks."""
    return el(
        "span",
        {"class": f"mark {kind}", "title": meaning},
        el("span", {"class": "sign", "aria-hidden": "true"}, sign),
        el("span", {"class": "word"}, word),
    )
