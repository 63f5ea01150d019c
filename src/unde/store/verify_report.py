"""Report of a verification of an index, a bank or a file of weights."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from unde.store.remote import StorePath

DAMAGED, FOREIGN, MISSING = "damaged", "foreign", "missing"


@dataclass(frozen=True)
class Damage:
    """A file that is damaged, foreign or missing, and what restores it."""

    name: str  # relative to what was verified
    kind: str
    why: str
    advice: str

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.name} is {self.kind}{why}: {self.advice}"


@dataclass
class VerifyReport:
    """True if nothing is damaged. `unfinished` tells what is still to do."""

    path: StorePath
    what: str  # index, bank or weights
    files: int = 0
    bytes: int = 0
    unfinished: str = ""
    notes: list[str] = field(default_factory=list)  # what could not be checked, or does no harm
    problems: list[Damage] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        count = f"{self.files:,} file{'s' if self.files != 1 else ''}, {self.bytes:,} bytes"
        state = "whole" if self else f"{len(self.problems)} of its files are not as they were written"
        if self and self.unfinished:
            state = "sound as far as it goes"
        lines = [f"{self.path}: {self.what}, {state} ({count} checked)"]
        lines += [f"  {problem}" for problem in self.problems]
        lines += [f"  not finished: {self.unfinished}"] * bool(self.unfinished)
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def count(self, path: StorePath) -> None:
        """Count a file that was read to its end."""
        self.files += 1
        self.bytes += path.stat().st_size

    def report(self, path: StorePath, kind: str, why: object, advice: str) -> None:
        name = str(path).removeprefix(str(self.path)).lstrip(os.sep + "/") or str(path)
        self.problems.append(Damage(name, kind, str(why), advice))

    def add_unfinished(self, what: str) -> None:
        self.unfinished = f"{self.unfinished}; {what}" if self.unfinished else what

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"path": str(self.path), "sound": bool(self)}
