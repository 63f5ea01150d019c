"""What the parts of the page are written with: results, figures and the words for what was not measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from experiments.runner import command
from experiments.shared.paths import RESULTS

Estimate = Mapping[str, Any]  # {"mean", "ci95", "ci95_total", …}: what unde.evaluate.Estimate.as_dict gives
NONE = "–"


@dataclass(eq=False)
class Book:
    """The results that are there, and the figures that sections drew from them."""

    folder: Path = RESULTS
    figures: dict[str, str] = field(default_factory=dict)  # file name → SVG

    def get(self, name: str) -> dict[str, Any] | None:
        found = _read(self.folder / f"{name}.json")
        return None if found is None else found["results"]

    def results(self, study: str, banks: Iterable[str]) -> dict[str, Any]:
        """The results of a study by bank, of those that are there."""
        found = {bank: self.get(f"{study}_{bank}") for bank in banks}
        return {bank: result for bank, result in found.items() if result is not None}

    def figure(self, name: str, svg: str, words: str) -> str:
        """Keeps the picture for docs/figures; returns the line that shows it on a page of docs."""
        self.figures[f"{name}.svg"] = svg
        return f"![{words}](figures/{name}.svg)"

    def missing(self, names: Iterable[str]) -> str:
        """A line for each result that is not there; nothing if all are."""
        lacking = [name for name in names if self.get(name) is None]
        return "\n".join(f"Not measured: `{command(name)}`." for name in lacking)


@cache
def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def table(head: str | Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column has the names. The head may be one text with bars between its columns.

    >>> print(table("| LDS", [["TracIn", "4.15"]]))
    | | LDS |
    |---|---|
    | TracIn | 4.15 |
    """
    head = [cell.strip() for cell in head.split("|")] if isinstance(head, str) else head
    lines = [head, ["---"] * len(head), *rows]
    made = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in lines]
    made[1] = "|" + "---|" * len(head)
    return "\n".join(made)


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """With a real minus; what rounds to zero has no sign.

    >>> number(-0.126), number(0.126, sign=True), number(-0.001), number(None)
    ('−0.13', '+0.13', '0.00', '–')
    """
    if value is None:
        return NONE
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", "−")


def shown(e: Estimate | None, scale: float = 100.0, digits: int = 2, sign: bool = False) -> str:
    """Mean ± half width of the 95 % interval over queries (over queries and subsets).

    >>> shown({"mean": 0.0415, "ci95": 0.0111, "ci95_total": 0.0335})
    '4.15 ± 1.11 (3.35)'
    """
    if e is None:
        return NONE
    text = number(scale * e["mean"], digits, sign)
    if e.get("ci95") is not None:
        text += f" ± {scale * e['ci95']:.{digits}f}"
    if e.get("ci95_total") is not None:
        text += f" ({scale * e['ci95_total']:.{digits}f})"
    return text


def half_width(difference: Estimate) -> float:
    """Of the 95 % interval over queries and subsets, where it is known, else over queries."""
    return difference["ci95"] if difference.get("ci95_total") is None else difference["ci95_total"]


def paragraphs(*parts: str) -> str:
    """Parts with a blank line between them, empty ones left out."""
    return "\n\n".join(part.strip("\n") for part in parts if part)


def filled(text: str, marker: str, part: Callable[[str], str | None]) -> str:
    """A page whose tables between `<!-- marker: name -->` and `<!-- end -->` are as `part(name)` writes them now."""

    def one(match: re.Match[str]) -> str:
        made = part(match["name"])
        return match[0] if made is None else f"{match[1]}{made}\n{match[3]}"

    marked = rf"^(<!-- {marker}: (?P<name>[\w-]+) -->\n).*?^(<!-- end -->)"
    return re.sub(marked, one, text, flags=re.S | re.M)


def placed(template: str, part: Callable[..., str]) -> str:
    """A template whose `{{ name words }}` are as `part(name, *words)` writes them now."""
    made = re.sub(r"\{\{ (\w+)([^}]*) \}\}", lambda match: part(match[1], *match[2].split()), template)
    return re.sub(r"\n{3,}", "\n\n", made)
