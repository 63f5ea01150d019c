"""The frame of the page, in which scripts put what they are told. No data are in it."""

from __future__ import annotations

from unde.ui.report.html import Html, el
from unde.ui.report.items import DIFFERS
from unde.ui.report.queries import RIGHT, WRONG
from unde.ui.report.tokens import key


def page(title: str, examples: int, calibration: str | None = None) -> str:
    """The whole page as text."""
    head = el(
        "head",
        None,
        el("meta", {"charset": "utf-8"}),
        el("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        el("meta", {"name": "color-scheme", "content": "light dark"}),
        el("title", None, title),
        el("link", {"rel": "icon", "href": "data:,"}),
        el("link", {"rel": "stylesheet", "href": "/static/explorer.css"}),
        el("script", {"type": "module", "src": "/static/app.js"}),
    )
    body = el(
        "body",
        {"id": "top"},
        el("a", {"class": "skip", "href": "#answer"}, "Skip to the answer"),
        _bar(),
        el(
            "header",
            {"class": "masthead"},
            el("h1", None, title),
            el("p", {"class": "subtitle", "id": "subtitle"}, f"{examples:,} training examples"),
            el("p", {"class": "subtitle", "id": "calibration"}, f"Calibrated: {calibration}.")
            if calibration
            else None,
            el("noscript", None, "This page needs JavaScript."),
        ),
        el("main", {"id": "main"}, _ask(), _answer(), _marked()),
        _dialog(),
        _templates(),
    )
    return f'<!doctype html>\n<html lang="en">\n{head}\n{body}\n</html>\n'


def _bar() -> Html:
    return el(
        "nav",
        {"class": "contents", "aria-label": "parts of this page"},
        el(
            "ul",
            None,
            el("li", {"class": "brand"}, el("a", {"href": "#top", "data-jump": "top"}, "unde")),
            el("li", None, el("span", {"id": "queue", "class": "queue", "role": "status"})),
            [
                el("li", None, el("a", {"href": f"#{part}", "data-jump": part}, name))
                for part, name in (("ask", "Ask"), ("answer", "Answer"), ("marked", "Marked"))
            ],
            el("li", None, el("button", {"type": "button", "class": "quiet", "id": "copy"}, "Copy link")),
        ),
    )


def _ask() -> Html:
    return el(
        "section",
        {"id": "ask", "class": "ask", "aria-labelledby": "ask-title"},
        el("h2", {"id": "ask-title", "class": "sr"}, "Ask"),
        el("div", {"class": "tabs", "role": "tablist", "aria-label": "what to ask about", "id": "tabs"}),
        el("div", {"id": "panes", "class": "panes"}),
        el("ul", {"id": "set", "class": "chips", "aria-label": "the set of queries", "hidden": True}),
        el("p", {"id": "error", "class": "problem", "role": "alert", "hidden": True}),
    )


def _answer() -> Html:
    return el(
        "section",
        {"id": "answer", "aria-labelledby": "answer-title", "tabindex": "-1"},
        el("h2", {"id": "answer-title", "class": "sr"}, "Answer"),
        el("div", {"id": "busy", "class": "busy", "role": "status", "hidden": True}),
        el(
            "article",
            {"id": "result", "class": "query", "hidden": True},
            el("header", {"class": "asked", "id": "asked"}),
            el(
                "div",
                {"class": "found"},
                el("form", {"class": "controls", "id": "controls", "aria-label": "how to look"}),
                el("ul", {"class": "legend", "id": "legend"}, key()),
                el(
                    "ul",
                    {"class": "warnings", "id": "warnings", "aria-label": "read this first", "hidden": True},
                ),
                el("p", {"class": "note", "id": "notes"}),
                el("div", {"class": "rows", "id": "rows", "aria-live": "off"}),
            ),
            el("details", {"class": "weighing", "id": "weighing", "open": True}),
        ),
    )


def _marked() -> Html:
    return el(
        "section",
        {"id": "marked", "aria-labelledby": "marked-title"},
        el("h2", {"id": "marked-title"}, "Marked examples"),
        el(
            "p",
            {"class": "lead", "id": "marked-lead"},
            "Open a training example to mark it: as wrongly labelled, as a duplicate, or to be removed.",
        ),
        el("div", {"id": "marked-list"}),
    )


def _dialog() -> Html:
    return el("dialog", {"id": "detail", "class": "detail", "aria-labelledby": "detail-title"})


def _templates() -> list[Html]:
    """Small signs, by the report's renderer, for scripts to copy."""
    signs = {"differs": DIFFERS, "right": RIGHT, "wrong": WRONG}
    return [el("template", {"id": f"sign-{name}"}, sign) for name, sign in signs.items()]
