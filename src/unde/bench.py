"""What features cost: `Index.build` as a ratio to one plain training pass over the same examples.

Three passes over a few batches are timed in turn, over and over, so that noise of the machine hits all alike:

    plain     forward and backward with all weights requiring grad: what training on them costs at least
    frozen    the same with frozen weights and no features: the floor under any feature pass
    build     the features of Index.build, in passes of the size that it settles, writing included

Planning (a few examples against autograd, fingerprints) is paid once for an index and reported apart.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unde import console
from unde.data import Rows
from unde.features import floor
from unde.index import Index
from unde.methods import Method, TracIn
from unde.recipe import Setup
from unde.store.layout import LOG


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


def measure(setup: Setup, rank: int = 16, batch_size: int = 32, runs: int = 15, batches: int = 4) -> Cost:
    """Time the passes on the first batches of the training data, which is repeated if there are fewer.

    Plain and frozen passes have `batch_size` examples, as in training.
    """
    data = setup.rows(setup.train_data)
    rows = Rows([data[i % len(data)] for i in range(batches * batch_size)], data.collate)
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
            begun = time.perf_counter()
            took = build(setup, rows, TracIn(projection=f"kron({rank})"))
            seconds["build"].append(took)
            seconds["planning"].append(time.perf_counter() - begun - took)
            advance(1)
    return Cost(len(rows), **{name: np.array(s[1:]) for name, s in seconds.items()})  # the first run warms up


def build(
    setup: Setup, data: Any, method: Method, use: Callable[[Index], Any] | None = None, memory: str = "2GB"
) -> float:
    """Seconds that the features took, in an index in a temporary folder, which `use` may ask something."""
    folder = Path(tempfile.mkdtemp(prefix="unde-bench-"))
    try:
        index = Index.build(
            setup.model,
            setup.task,
            data,
            folder / "index",
            method=method,
            collate=setup.collate,
            memory=memory,
            progress=False,
        )
        if use is not None:
            use(index)
        return json.loads((index.folder / LOG).read_text().splitlines()[-1])["seconds"]
    finally:
        shutil.rmtree(folder)
