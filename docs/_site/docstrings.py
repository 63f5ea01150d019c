"""Docstrings as they are written in the package, one pair of backticks and plain text, made into reStructuredText."""

from __future__ import annotations

import re
from typing import Any

MADE = {  # by functions and methods, never by their users: how they are made is not shown
    *(
        "unde.Index",
        "unde.index.calibration.Calibration",
        "unde.GroupScores",
        "unde.scoring.top.Top",
        "unde.index.token_scores.TokenScores",
    ),
    "unde.index.query_features.QueryFeatures",
    *(
        "unde.store.verify_report.VerifyReport",
        "unde.plan.Plan",
        "unde.evaluate.FineGrained",
        "unde.evaluate.Comparison",
    ),
}
_CODE = re.compile(r"`([^`]+)`")
_MEANS_SOMETHING = re.compile(r"([*|\\]|_(?=\W|$))")  # to reStructuredText, and nothing in our prose


def paragraph(text: str) -> str:
    r"""Prose, whose names in backticks may span two lines.

    >>> paragraph("Σ_j w_j of `top` and *args, |x|")
    'Σ_j w_j of ``top`` and \\*args, \\|x\\|'
    """
    parts = _CODE.split(text)
    return "".join(
        "``" + re.sub(r"\s+", " ", part) + "``\\ " if i % 2 else _MEANS_SOMETHING.sub(r"\\\1", part)
        for i, part in enumerate(parts)
    ).replace("``\\  ", "`` ")


def arguments(block: str) -> str:
    """`name: what it is`, with what follows indented, as fields."""
    return re.sub(r"^(\w+): ", r":param \1: ", paragraph(block), flags=re.M)


_SECTIONS = {"Args:": "param {}", "Attributes:": "ivar {}", "Raises:": "raises {}", "Returns:": "returns"}


def section(block: str) -> str:
    r"""A section of a Google-style docstring as a list of fields; what follows a name may span several lines.

    >>> section("Args:\n    k: How many,\n        at most.\n    seed: Of draws.")
    ':param k: How many, at most.\n:param seed: Of draws.'
    """
    head, *rest = block.split("\n")
    field = _SECTIONS[head.strip()]
    if "{}" not in field:
        return f":{field}: " + paragraph(" ".join(line.strip() for line in rest))
    entries: list[str] = []
    for line in rest:
        if re.match(r" {4}\S", line) or not entries:
            entries.append(line.strip())
        else:
            entries[-1] += f" {line.strip()}"
    named = (entry.partition(": ") for entry in entries)
    return "\n".join(f":{field.format(name)}: {paragraph(words)}" for name, _, words in named)


def prose(lines: list[str]) -> list[str]:
    """A docstring: examples stay as they are, other indented blocks are shown as they are written."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        if block.lstrip().startswith(">>>"):
            made = block
        elif block.split("\n")[0].strip() in _SECTIONS:
            made = section(block)
        elif all(line.startswith("    ") for line in block.split("\n")):
            made = "::\n\n" + block
        elif all(re.match(r"\w+: |    ", line) for line in block.split("\n")):
            made = arguments(block)
        else:
            made = paragraph(block)
        out += [*made.split("\n"), ""]
    return out


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = prose(lines)


def _signature(app: Any, what: str, name: str, *_: Any) -> tuple[str, None] | None:
    return ("", None) if name in MADE else None


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True}
