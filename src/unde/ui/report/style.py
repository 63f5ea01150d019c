"""The style sheet of report pages; the live page adds its own to it."""

from __future__ import annotations

from importlib.resources import files

CSS = files("unde.ui.report").joinpath("style.css").read_text(encoding="utf-8")
