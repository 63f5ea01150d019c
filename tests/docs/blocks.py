"""The code on a page: what is in its fences, and what comments beside them say about it.

A comment that no reader sees may stand right above a fence:

    <!-- not run: why -->        it is checked, and not run
    <!-- file: setup.py -->      it is the content of a file, which is written and not run

and `<!-- run: … -->` anywhere holds Python that readers need not see, such as data that they have and a test has not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "experiments" / "README.md", *sorted(DOCS.rglob("*.md"))]
SHELL = {"sh", "console", "bash", "shell"}
_FENCE = re.compile(
    r"^<!-- run:\n(?P<hidden>.*?)^-->$"
    r"|(?:^<!-- (?P<mark>not run|file): (?P<said>[^\n]*?) -->\n\s*\n?)?"
    r"^(?P<ticks>```+)(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=ticks)$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its first line of code
    language: str
    code: str
    not_run: str | None = None  # the reason
    file: str | None = None  # whose content it is

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """All of them, in order."""
    text = page.read_text() if text is None else text
    out = []
    for match in _FENCE.finditer(text):
        hidden = match["hidden"] is not None
        start = match.start("hidden") if hidden else match.start("code")
        language = "python" if hidden else match["language"].strip()
        said = {match["mark"]: match["said"]} if not hidden and match["mark"] else {}
        code = match["hidden"] if hidden else match["code"]
        line = text.count("\n", 0, start) + 1
        out.append(Block(page, line, language, code, said.get("not run"), said.get("file")))
    return out


def prose(page: Path) -> str:
    """What is left without fences and comments."""
    text = re.sub(r"^(```+)[^\n]*\n.*?^\1$", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def inline(page: Path) -> list[str]:
    """The pieces of code within its text."""
    return [" ".join(found.split()) for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]
