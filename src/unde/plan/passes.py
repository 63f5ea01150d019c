"""What the passes of a run cost, found by running their real code on shapes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unde.data import map_tensors
from unde.errors import UndeError
from unde.features import Collector, Coverage, Unit, floor, placement
from unde.features.coverage import FAILURES
from unde.features.directions import sides_of
from unde.features.factors import Factors, gathered
from unde.features.meter import Meter
from unde.methods import Method
from unde.plan.shapes import (
    Batches,
    ShapePlanner,
    matrices,
    no_numbers,
    undrawn_units,
    without_numbers,
)
from unde.projection import Spec
from unde.tasks.base import Task


@dataclass(frozen=True)
class Cost:
    """Of one batch: operations, and the most bytes alive at once, with the model and all it was given."""

    flops: int
    peak: int


@dataclass(frozen=True)
class Measured:
    """`weights` and `projection` are the bytes of the model and of the projection matrices."""

    units: list[Unit]
    coverage: Coverage
    weights: int
    trained: int  # bytes of the parameters that a training step moves
    projection: int
    plain: Cost  # forward and backward with weight gradients
    frozen: Cost  # the same without
    checking: Cost  # of a few examples against autograd
    features: Cost
    directions: Cost | None = None  # of a batch of the sample for pca
    given: int = 0  # bytes of the directions that it finds


def measure(
    model: nn.Module,
    task: Task,
    batches: Batches,
    names: Sequence[str],
    method: Method,
    batch_size: int,
    memory: int,
) -> Measured:
    with no_numbers(), _quiet():
        try:
            return _Passes(without_numbers(model), task, batches, method, batch_size, memory).run(names)
        except UndeError:
            raise
        except FAILURES as e:
            raise UndeError(
                f"the {type(model).__name__} cannot run on shapes alone ({type(e).__name__}: {e}). Check that the "
                "batch is like those of the task; if the model looks at values to decide what to compute, build an "
                "index of a few hundred examples and scale up"
            ) from e


@dataclass
class _Passes:
    model: nn.Module  # without numbers
    task: Task
    batches: Batches
    method: Method
    batch_size: int
    memory: int  # the budget

    def run(self, names: Sequence[str]) -> Measured:
        model, spec, self.meter = self.model, Spec.parse(str(self.method.projection)), Meter()
        weights = self.meter.hold([*model.parameters(), *model.buffers()])
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        plain = self._cost(lambda batch: floor.plain(model, self.task, [batch]))
        for name, p in model.named_parameters():
            p.requires_grad_(name in names)  # the backward pass ends where the first attributed one is
        frozen = self._cost(lambda batch: floor.frozen(model, self.task, [batch]))
        units = undrawn_units(model, names, str(spec))
        projection = self.meter.hold(matrices(units))
        self.meter.restart()
        with self.meter:
            planner = ShapePlanner(model, self.task, self.batches, units, self.method.measure)
            coverage = planner.run()
        checking = Cost(self.meter.flops, self.meter.peak)
        del planner
        described = [{"name": u.name, "shape": u.shape} for u in units]
        sizes = gathered(described, str(spec)) if self.method.factors else None
        features = self._collect(units, coverage, sizes)
        directions, given = None, 0
        if spec.kind == "pca":  # last: it changes the projections
            wide = {u.name: sides_of(u, spec.size, coverage.uses) for u in units}
            for u in units:
                u.projection.widen(*(n is not None for n in wide[u.name]))
            wide = {n: pair for n, pair in wide.items() if any(pair)}
            given = 4 * spec.size * sum(n for pair in wide.values() for n in pair if n)
            directions = self._collect(units, coverage, wide, emit=False)
        return Measured(
            units=units,
            coverage=coverage,
            weights=weights,
            trained=trained,
            projection=projection,
            plain=plain,
            frozen=frozen,
            checking=checking,
            features=features,
            directions=directions,
            given=given,
        )

    def _collect(self, units: list[Unit], coverage: Coverage, sizes: Any, emit: bool = True) -> Cost:
        """A batch through the collector; `sizes` of covariances, if it gathers any."""
        measure, beside = self.method.measure, self.method.beside if emit else ()
        given = units, coverage, measure
        with Meter(), Collector(self.model, self.task, *given, emit=emit, beside=beside) as collect:
            collect.fit(self.memory, self.batches(1))
        task = collect.task

        def run(batch: Any) -> None:
            factors = None if sizes is None else Factors(sizes, *placement(self.model))
            with Collector(self.model, task, *given, factors, emit, beside) as collect:
                collect(batch, list(range(self.batch_size)))

        return self._cost(run)

    def _cost(self, run: Callable[[Any], None]) -> Cost:
        gc.collect()  # hooks and graphs hold each other in circles
        batch = self.batches(self.batch_size)
        self.meter.hold(_tensors(batch))
        self.meter.restart()
        with self.meter:
            run(batch)
        return Cost(self.meter.flops, self.meter.peak)


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(batch, note)
    return found


@contextmanager
def _quiet() -> Generator[None]:
    """Guesses about layouts may fail; torch would print each failure of a fake tensor."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)
