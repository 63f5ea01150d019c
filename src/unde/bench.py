"""What features cost: `Index.build` as a ratio to one plain training pass over the same examples.

Three passes over a few batches are timed in turn, over and over, so that noise of the machine hits all alike:

    plain     forward and backward with all weights requiring grad: what training on them costs at least
    frozen    the same with frozen weights and no features: the floor under any feature pass
    build     Index.build from its first batch to its end, writing included

Planning (a few examples against autograd, fingerprints) is paid once for an index and reported apart.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unde import console
from unde.data import Collate, Rows
from unde.errors import UndeError
from unde.features import floor
from unde.features.coverage import EXAMPLES
from unde.index import Index
from unde.methods import Method, TracIn
from unde.recipe import Setup


@dataclass(frozen=True)
class Cost:
    """Seconds of every run, (runs,) each."""

    examples: int
    plain: np.ndarray
    frozen: np.ndarray
    build: np.ndarray
    planning: np.ndarray

    @property
    def ratio(self) -> float:
        return float(np.median(self.build / self.plain))

    @property
    def floor(self) -> float:
        return float(np.median(self.frozen / self.plain))

    @property
    def overhead(self) -> float:
        """(build − frozen) / plain."""
        return float(np.median((self.build - self.frozen) / self.plain))

    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the median ratio, by bootstrap over the runs."""
        ratios, rng = self.build / self.plain, np.random.default_rng(0)
        medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
        return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval()
        return {
            "ratio": round(self.ratio, 3),
            "interval95": [round(low, 3), round(high, 3)],
            "floor": round(self.floor, 3),
            "overhead": round(self.overhead, 3),
            "plain_seconds": round(float(np.median(self.plain)), 4),
            "planning_seconds": round(float(np.median(self.planning)), 3),
            "examples": self.examples,
            "runs": len(self.plain),
        }

    def __str__(self) -> str:
        low, high = self.interval()
        per_second = self.examples / float(np.median(self.build))
        return (
            f"features cost {self.ratio:.2f} of a plain pass [{low:.2f}, {high:.2f}]; the frozen floor is "
            f"{self.floor:.2f}, the overhead over it {self.overhead:.2f}; {per_second:,.0f} examples/s after "
            f"{np.median(self.planning):.1f} s of planning "
            f"({len(self.plain)} interleaved runs over {self.examples} examples)"
        )


class Start:
    """A collate function that notes when the build asks for its first whole batch: planning is over."""

    def __init__(self, collate: Collate, batch_size: int) -> None:
        self.collate, self.batch_size = collate, batch_size
        self.time: float | None = None

    def __call__(self, examples: list[Any]) -> Any:
        if len(examples) == self.batch_size and self.time is None:
            self.time = time.perf_counter()
        return self.collate(examples)


def measure(setup: Setup, rank: int = 16, batch_size: int = 32, runs: int = 15, batches: int = 4) -> Cost:
    """Time the passes on the first batches of the training data, which is repeated if there are fewer."""
    if batch_size <= EXAMPLES:
        raise UndeError(
            f"batch_size {batch_size}: expected at least {EXAMPLES + 1} to tell batches from planning"
        )
    data, collate = Rows(setup.train_data), setup.collate or setup.task.collate
    rows = Rows([data[i % len(data)] for i in range(batches * batch_size)], collate)
    seconds: dict[str, list[float]] = {"plain": [], "frozen": [], "build": [], "planning": []}
    with console.progress("timing", runs + 1, unit="runs") as advance:
        for _ in range(runs + 1):
            for name, run in (("plain", floor.plain), ("frozen", floor.frozen)):
                begun = time.perf_counter()
                run(
                    setup.model,
                    setup.task,
                    (rows.batch(range(a, a + batch_size)) for a in range(0, len(rows), batch_size)),
                )
                seconds[name].append(time.perf_counter() - begun)
            begun, start = time.perf_counter(), Start(collate, batch_size)
            build(setup, rows, batch_size, TracIn(projection=f"kron({rank})"), start)
            assert start.time is not None
            seconds["build"].append(time.perf_counter() - start.time)
            seconds["planning"].append(start.time - begun)
            advance(1)
    return Cost(len(rows), **{name: np.array(s[1:]) for name, s in seconds.items()})  # the first run warms up


def build(
    setup: Setup,
    data: Any,
    batch_size: int,
    method: Method,
    collate: Collate | None = None,
    use: Callable[[Index], Any] | None = None,
) -> None:
    """An index in a temporary folder, which `use` may ask something before it is gone."""
    folder = tempfile.mkdtemp(prefix="unde-bench-")
    try:
        index = Index.build(
            setup.model,
            setup.task,
            data,
            Path(folder) / "index",
            method=method,
            batch_size=batch_size,
            collate=collate,
            progress=False,
        )
        if use is not None:
            use(index)
    finally:
        shutil.rmtree(folder)
