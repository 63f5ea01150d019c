"""What features cost: `Index.build` as a ratio to one plain training pass over the same examples.

One index is built; in front of every batch of it two other passes over that batch are timed on a copy of the
model, so that noise of the machine hits all three alike:

    plain     forward and backward with all weights requiring grad: what training on it costs at least
    frozen    the same with frozen weights and no features: the floor under any feature pass
    build     the time that Index.build takes until it asks for the next batch, with its share of the writing

Planning (a few examples against autograd, fingerprints) is paid once for an index and reported apart.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whence.data import Collate, Rows, to_device
from whence.errors import WhenceError
from whence.features.collector import Source
from whence.features.guard import untouched
from whence.features.layers import rule_for
from whence.features.plan import EXAMPLES
from whence.features.units import placement
from whence.index import Index
from whence.methods import TracIn
from whence.setup import Setup


@dataclass(frozen=True)
class Cost:
    """Seconds of every batch, (runs,) each, and of the planning before the first."""

    batch_size: int
    plain: np.ndarray
    frozen: np.ndarray
    build: np.ndarray
    planning: float

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
        """A 95 % interval of the median ratio, by bootstrap over the batches."""
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
            "plain_seconds_per_batch": round(float(np.median(self.plain)), 4),
            "planning_seconds": round(self.planning, 3),
            "batch_size": self.batch_size,
            "runs": len(self.plain),
        }

    def __str__(self) -> str:
        low, high = self.interval()
        per_second = self.batch_size / float(np.median(self.build))
        return (
            f"features cost {self.ratio:.2f} of a plain pass [{low:.2f}, {high:.2f}]; the frozen floor is "
            f"{self.floor:.2f}, the overhead over it {self.overhead:.2f}; {per_second:,.0f} examples/s after "
            f"{self.planning:.1f} s of planning ({len(self.plain)} interleaved batches of {self.batch_size})"
        )


class _Interleaved:
    """A collate function that times the other passes whenever the build asks for a batch."""

    def __init__(self, setup: Setup, batch_size: int) -> None:
        self.collate = setup.collate or setup.task.collate
        self.setup = replace(setup, model=copy.deepcopy(setup.model))
        self.batch_size = batch_size
        self.seconds: dict[str, list[float]] = {"plain": [], "frozen": [], "build": []}
        self.resumed: float | None = None
        self.started = time.perf_counter()
        self.planning = 0.0

    def __call__(self, examples: list[Any]) -> Any:
        batch = self.collate(examples)
        if len(examples) != self.batch_size:  # planning
            return batch
        now = time.perf_counter()
        if self.resumed is None:
            self.planning = now - self.started
        else:
            self.seconds["build"].append(now - self.resumed)
        for name, run in (("plain", plain), ("frozen", frozen)):
            begun = time.perf_counter()
            run(self.setup, batch)
            self.seconds[name].append(time.perf_counter() - begun)
        self.resumed = time.perf_counter()
        return batch

    def cost(self, ended: float) -> Cost:
        """Without the first batch, which warms up; what followed the last one is writing, shared by all."""
        assert self.resumed is not None
        tail = ended - self.resumed
        build = np.array(self.seconds["build"][1:])
        writing = max(0.0, tail - float(np.median(build)))
        build = np.append(build, tail - writing) + writing / (len(build) + 2)
        others = {n: np.array(self.seconds[n][1:]) for n in ("plain", "frozen")}
        return Cost(self.batch_size, **others, build=build, planning=self.planning)


def measure(setup: Setup, rank: int = 16, batch_size: int = 32, runs: int = 15) -> Cost:
    """Build an index of `runs` + 1 batches of the training data, repeated if there are fewer."""
    if batch_size <= EXAMPLES:
        raise WhenceError(f"batch_size {batch_size}: expected at least {EXAMPLES + 1} to measure batches")
    data = Rows(setup.train_data)
    rows = [data[i % len(data)] for i in range((runs + 1) * batch_size)]
    interleaved = _Interleaved(setup, batch_size)
    build(setup, rows, batch_size, rank, interleaved)
    return interleaved.cost(time.perf_counter())


def plain(setup: Setup, batch: Any) -> None:
    model, (device, _) = setup.model, placement(setup.model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with untouched(model):
        for p in trained:
            p.requires_grad_(True)
        setup.task.loss(model, to_device(batch, device)).sum().backward()


def frozen(setup: Setup, batch: Any) -> None:
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
            loss = setup.task.loss(model, to_device(batch, device)).sum()
            torch.autograd.grad(loss, anchor, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def build(setup: Setup, data: Any, batch_size: int, rank: int, collate: Collate | None = None) -> None:
    """An index in a temporary folder."""
    folder = tempfile.mkdtemp(prefix="whence-bench-")
    try:
        Index.build(
            setup.model,
            setup.task,
            data,
            Path(folder) / "index",
            method=TracIn(projection=f"kron({rank})"),
            batch_size=batch_size,
            collate=collate,
            progress=False,
        )
    finally:
        shutil.rmtree(folder)
