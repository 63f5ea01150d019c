"""The markup of pages: `unde.markup`, and signs on examples."""

from __future__ import annotations

from unde.markup import Attribute, Child, Html, el, join, number, score, text

__all__ = ["Attribute", "Child", "Html", "el", "join", "mark", "number", "score", "text"]


def mark(kind: str, sign: str, word: str, meaning: str) -> Html:
    """A small sign on an example: a symbol, a word and a tooltip, so that colour alone never speaks."""
    return el(
        "span",
        {"class": f"mark {kind}", "title": meaning},
        el("span", {"class": "sign", "aria-hidden": "true"}, sign),
        el("span", {"class": "word"}, word),
    )
