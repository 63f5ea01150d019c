"""What features cost: `Index.build` as a ratio to one plain training pass over the same examples.

Three things are timed in turn, over and over, so that noise of the machine hits all alike:

    plain     forward and backward with all weights requiring grad: what one epoch of training costs at least
    frozen    the same with frozen weights and no features: the floor under any feature pass
    build     Index.build, everything included: planning, features, writing to disk
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
import torch
from torch import Tensor, nn

from whence import console
from whence.data import Rows, to_device
from whence.features.collector import Source
from whence.features.guard import untouched
from whence.features.layers import rule_for
from whence.features.units import placement
from whence.index import Index
from whence.methods import TracIn
from whence.setup import Setup


@dataclass(frozen=True)
class Cost:
    """Seconds of every run, (runs,) each."""

    examples: int
    plain: np.ndarray
    frozen: np.ndarray
    build: np.ndarray

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
            "plain_seconds": round(float(np.median(self.plain)), 3),
            "examples": self.examples,
            "runs": len(self.plain),
        }

    def __str__(self) -> str:
        low, high = self.interval()
        per_second = self.examples / float(np.median(self.build))
        return (
            f"features cost {self.ratio:.2f} of a plain pass [{low:.2f}, {high:.2f}], the frozen floor is "
            f"{self.floor:.2f}, the overhead over it {self.overhead:.2f} ({per_second:,.0f} examples/s, "
            f"{len(self.plain)} interleaved runs over {self.examples} examples)"
        )


def measure(setup: Setup, rank: int = 16, batch_size: int = 32, runs: int = 15, batches: int = 16) -> Cost:
    """Time the three passes on the first `batches` batches of the training data."""
    whole = Rows(setup.train_data, setup.collate or setup.task.collate)
    count = min(batches * batch_size, len(whole))
    rows = Rows([whole[i] for i in range(count)], whole.collate)
    passes: dict[str, Callable[[], None]] = {
        "plain": lambda: plain(setup, rows, batch_size),
        "frozen": lambda: frozen(setup, rows, batch_size),
        "build": lambda: build(setup, rows, batch_size, rank),
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    with console.progress("runs", runs + 1) as advance:
        for turn in range(runs + 1):  # the first turn warms up
            for name, run in passes.items():
                started = time.perf_counter()
                run()
                if turn:
                    seconds[name].append(time.perf_counter() - started)
            advance(1)
    return Cost(count, **{name: np.array(s) for name, s in seconds.items()})


def plain(setup: Setup, rows: Rows, batch_size: int) -> None:
    model, (device, _) = setup.model, placement(setup.model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with untouched(model):
        for p in trained:
            p.requires_grad_(True)
        for batch in _batches(rows, batch_size):
            for p in trained:
                p.grad = None
            setup.task.loss(model, to_device(batch, device)).sum().backward()


def frozen(setup: Setup, rows: Rows, batch_size: int) -> None:
    model, (device, _) = setup.model, placement(setup.model)
    anchor = torch.zeros((), device=device, requires_grad=True)

    def start_graph(_module: nn.Module, _args: Any, out: Tensor) -> Tensor | None:
        return None if out.requires_grad else Source.apply(out, anchor)

    held = [
        m
        for m in model.modules()
        if any(p.requires_grad for p in m.parameters(recurse=False)) and rule_for(m)
    ]
    handles = [m.register_forward_hook(start_graph) for m in held]
    try:
        with untouched(model):
            for batch in _batches(rows, batch_size):
                loss = setup.task.loss(model, to_device(batch, device)).sum()
                torch.autograd.grad(loss, anchor, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def build(setup: Setup, rows: Rows, batch_size: int, rank: int) -> None:
    folder = tempfile.mkdtemp(prefix="whence-bench-")
    try:
        Index.build(
            setup.model,
            setup.task,
            rows,
            Path(folder) / "index",
            method=TracIn(projection=f"kron({rank})"),
            batch_size=batch_size,
            progress=False,
        )
    finally:
        shutil.rmtree(folder)


def _batches(rows: Rows, batch_size: int) -> list[Any]:
    return [rows.batch(range(a, min(a + batch_size, len(rows)))) for a in range(0, len(rows), batch_size)]
