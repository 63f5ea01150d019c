"""The frame of the live page; scripts fill it. It holds no data."""

from __future__ import annotations

from importlib.resources import files
from string import Template

from unde.ui.report.html import Html, el, join, text
from unde.ui.report.items import DIFFERS
from unde.ui.report.queries import RIGHT, WRONG
from unde.ui.report.tokens import key


def page(title: str, examples: int, calibration: str | None = None) -> str:
    """The whole page as text."""
    frame = Template(files("unde.ui.explorer").joinpath("page.html").read_text(encoding="utf-8"))
    sentence = el("p", {"class": "subtitle", "id": "calibration"}, f"Calibrated: {calibration}.")
    signs = {"differs": DIFFERS, "right": RIGHT, "wrong": WRONG}  # for scripts to copy
    templates = [el("template", {"id": f"sign-{name}"}, sign) for name, sign in signs.items()]
    return frame.substitute(
        title=text(title),
        examples=f"{examples:,}",
        calibration=sentence if calibration else Html(""),
        token_key=key(),
        templates=join(templates),
    )
