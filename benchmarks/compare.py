"""Ratios of two results, and which of them got worse. Seconds are not compared: they are those of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RELATIVE, ABSOLUTE = 0.05, 0.02  # changes that nobody would notice, whatever the intervals say
SKIPPED = ("peers",)  # others are not ours to get better


@dataclass(frozen=True)
class Estimate:
    ratio: float
    low: float
    high: float
    higher_is_better: bool = False

    def __str__(self) -> str:
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Change:
    """Of one ratio; worse or better only if the intervals do not touch and the change is worth a word."""

    name: str
    before: Estimate
    now: Estimate

    @property
    def worse(self) -> bool:
        return self._beyond(self.before.higher_is_better)

    @property
    def better(self) -> bool:
        return self._beyond(not self.before.higher_is_better)

    def _beyond(self, downwards: bool) -> bool:
        a, b = self.before, self.now
        slack = max(RELATIVE * abs(a.ratio), ABSOLUTE)
        if downwards:
            return b.high < a.low and b.ratio < a.ratio - slack
        return b.low > a.high and b.ratio > a.ratio + slack

    def __str__(self) -> str:
        word = "got worse" if self.worse else "got better" if self.better else "is as it was"
        return f"{self.name} {word}: {self.now}, stored is {self.before}"


def ratios(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Estimate]]:
    """All that may be compared in a result, by where it is."""
    if isinstance(found, dict):
        spread = found.get("interval95") or found.get("range")
        if "ratio" in found and spread:
            low, high = spread
            yield ", ".join(path), Estimate(found["ratio"], low, high, found.get("better") == "higher")
        for key, value in found.items():
            if key not in SKIPPED:
                yield from ratios(value, (*path, str(key)))
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from ratios(value, (*path, _named(value, number)))


def _named(value: Any, number: int) -> str:
    """Rows of a list go by their words, so that a quick run with fewer rows is compared with the right ones."""
    if isinstance(value, dict):
        words = [
            f"{k} {v}" for k, v in value.items() if isinstance(v, str) or (isinstance(v, int) and k != "runs")
        ]
        if words:
            return " ".join(words)
    return str(number)


def compare(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Of what is in both, in the order of the new one."""
    stored = dict(ratios(before))
    return [Change(name, stored[name], found) for name, found in ratios(now) if name in stored]
