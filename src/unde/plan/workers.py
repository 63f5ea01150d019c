"""A build by several workers: what each of them does, what one process does for all, and how long that takes.

Workers share nothing but files. Shards are dealt out to them, and so are the jobs of each round of a kernel; in between
one process settles, merges partial results and fits K, while the others wait. Hours are operations and bytes over rates
that are given or measured, and nothing else.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from unde.console import duration, size
from unde.errors import UndeError
from unde.plan.show import columns, flops

SHOWN = (1, 8, 64)  # workers, to compare with
_ENOUGH = 0.9  # twice as many workers that still take this share of the time are not worth while
_COLUMNS = ("operations", "reads", "writes", "time")
_SIDE, _TRIES = 1024, 8  # of the matrices that a processor is timed with: the fastest product counts


@dataclass(frozen=True)
class Rates:
    """What one worker does in a second; None where nobody said."""

    flops: float | None  # operations of the model's passes, on its GPU if it has one
    cpu_flops: float  # operations of kernels, which run on its processor
    disk: float | None  # bytes that it reads or writes
    measured: bool  # whether `cpu_flops` is that of this machine


@dataclass(frozen=True)
class Stage:
    """Jobs that do not wait for one another. All numbers are those of all jobs together."""

    name: str
    jobs: int = 1
    passes: int = 0  # of the model
    model_flops: int = 0  # operations of these passes
    flops: int = 0  # operations on the processor
    reads: int = 0  # bytes
    writes: int = 0
    alone: bool = False  # one process does it, however many there are
    each: bool = False  # every worker does all of it

    def share(self, workers: int) -> float:
        """What the busiest worker does of it."""
        return 1.0 if self.alone or self.each else -(-self.jobs // workers) / self.jobs

    def seconds(self, workers: int, rates: Rates) -> float:
        """As far as rates are known."""
        model = self.model_flops / rates.flops if rates.flops else 0.0
        moved = (self.reads + self.writes) / rates.disk if rates.disk else 0.0
        return self.share(workers) * (model + self.flops / rates.cpu_flops + moved)


@dataclass(frozen=True)
class Reduced:
    """A round of a kernel: partial results that are merged into one."""

    name: str
    jobs: int
    partial: int  # bytes of the files of all jobs


@dataclass(frozen=True)
class Workers:
    """A build by `count` workers, kernel included; `str` shows it as tables."""

    count: int
    rates: Rates
    stages: tuple[Stage, ...]  # one after the other
    rounds: tuple[Reduced, ...]
    merged: int  # bytes of the file that all partial results become

    def hours(self, count: int) -> float:
        return sum(stage.seconds(count, self.rates) for stage in self.stages) / 3600

    def enough(self) -> int:
        """As many workers, a power of two or all that find a job, that twice as many save less than a tenth."""
        count, most = 1, max(s.jobs for s in self.stages)
        while count < most and self.hours(2 * count) < _ENOUGH * self.hours(count):
            count *= 2
        return min(count, most)

    def each(self) -> dict[str, dict[str, float]]:
        """What the busiest worker does, by stage."""
        shares = {s.name: (s, s.share(self.count)) for s in self.stages if not s.alone}
        return {
            name: {
                "jobs": round(share * s.jobs),
                "passes": round(share * s.passes),
                "flops": share * (s.model_flops + s.flops),
                "reads": round(share * s.reads),
                "writes": round(share * s.writes),
                "hours": s.seconds(self.count, self.rates) / 3600,
            }
            for name, (s, share) in shares.items()
        }

    def as_dict(self) -> dict[str, Any]:
        timed = {"hours": {n: self.hours(n) for n in self._compared()}, "enough": self.enough()}
        return asdict(self) | {"each": self.each()} | (timed if self.rates.flops else {})

    def __str__(self) -> str:
        lines = [
            self._title(),
            "",
            *columns([("the busiest worker", "jobs", "of", "passes", *_COLUMNS), *self._worker_rows()]),
            "",
            *columns([("one process for all", *_COLUMNS), *self._alone_rows()]),
        ]
        if self.rounds:
            lines += ["", *columns([("reduction", "jobs", "partial files", "of each"), *self._round_rows()])]
        if self.rates.flops:
            lines += ["", *columns([("workers", "hours", "times as fast"), *self._time_rows()])]
            lines += [f"from {self.enough():,} workers on, twice as many save less than a tenth"]
        return "\n".join([*lines, *self._notes()])

    def _compared(self) -> list[int]:
        return sorted({*SHOWN, self.count})

    def _title(self) -> str:
        r = self.rates
        does = [f"{flops(r.cpu_flops)}/s on its processor" + (" (measured here)" if r.measured else "")]
        does = [f"{flops(r.flops)}/s in passes", *does] if r.flops else does
        does += [f"{size(round(r.disk))}/s from and to disk"] if r.disk else []
        return f"{self.count} worker{'s' if self.count > 1 else ''}, each with {', '.join(does)}"

    def _worker_rows(self) -> list[tuple[str, ...]]:
        rows, jobs = [], {s.name: s.jobs for s in self.stages}
        for name, did in self.each().items():
            counts = f"{did['jobs']:,}", f"{jobs[name]:,}", f"{did['passes']:,}"
            moved = size(int(did["reads"])), size(int(did["writes"]))
            rows.append((name, *counts, flops(did["flops"]), *moved, self._time(did["hours"])))
        return rows

    def _alone_rows(self) -> list[tuple[str, ...]]:
        return [
            (
                s.name,
                flops(s.model_flops + s.flops),
                size(s.reads),
                size(s.writes),
                self._time(s.seconds(1, self.rates) / 3600),
            )
            for s in self.stages
            if s.alone
        ]

    def _round_rows(self) -> list[tuple[str, ...]]:
        rows = [(r.name, f"{r.jobs:,}", size(r.partial), size(r.partial // r.jobs)) for r in self.rounds]
        return [*rows, ("merged", "", size(self.merged), "")]

    def _time_rows(self) -> list[tuple[str, ...]]:
        alone = self.hours(1)
        return [(f"{n:,}", f"{self.hours(n):.3g}", f"{alone / self.hours(n):.3g}") for n in self._compared()]

    def _time(self, hours: float) -> str:
        return duration(3600 * hours, exact=True) if self.rates.flops else "–"

    def _notes(self) -> list[str]:
        notes = []
        if not self.rates.flops:
            notes.append("hours need the operations that a worker does in a second: flops= (--flops 200T)")
        if not self.rates.disk:
            notes.append("reading and writing is not in the hours: give disk= (--disk 1GB), bytes a second")
        return ["\nnote: " + note for note in notes]


def rates_of(flops: float | str | None, cpu_flops: float | str | None, disk: float | None) -> Rates:
    """Rates as they are given; that of the processor is measured here unless it is given."""
    said = None if cpu_flops is None else operations(cpu_flops)
    given = None if flops is None else operations(flops)
    return Rates(given, _processor() if said is None else said, disk, said is None)


def operations(rate: float | str) -> float:
    """
    >>> operations("200T"), operations("1.5 G"), operations(1e12)
    (200000000000000.0, 1500000000.0, 1000000000000.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([kKMGTP]?)\s*", str(rate))
    found = 0.0 if match is None else float(match[1]) * 1000 ** " KMGTP".index(match[2].upper() or " ")
    if not found > 0:
        raise UndeError(f"cannot read the rate {rate!r}: expected operations a second, such as 200T or 50G")
    return found


def _processor() -> float:
    """Operations a second of this machine in float64, the precision that kernels add up in."""
    a, best = torch.ones(_SIDE, _SIDE, dtype=torch.float64), float("inf")
    for _ in range(_TRIES):
        begun = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begun)
    return 2 * _SIDE**3 / best
