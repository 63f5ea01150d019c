"""What the passes of a run cost, found by running their real code on shapes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import tensors
from unde.errors import UndeError
from unde.gradients import Coverage, Unit, floor, placement
from unde.gradients.batch_axis import FAILURES
from unde.gradients.factors import Factors, gathered
from unde.gradients.feature_pass import FeaturePass, Measurement, resized, settle_on
from unde.gradients.meter import Meter
from unde.gradients.pca import sides_of
from unde.index.feature_runner import step_of
from unde.methods import Fisher, Method
from unde.plan.shapes import (
    Batches,
    covered,
    matrices,
    no_numbers,
    undrawn_units,
    without_numbers,
)
from unde.projection import Spec
from unde.tasks.base import Task
from unde.tasks.batching import recut


@dataclass(frozen=True)
class Cost:
    """Of one pass: operations, and the most bytes alive at once beside the model and its projection matrices."""

    flops: int
    peak: int


@dataclass(frozen=True)
class Directions:
    """The pass that finds pca directions: how it is cut, what it costs, and what it finds, without content."""

    size: int
    rows: int | None
    cost: Cost
    made: dict[str, Tensor]


@dataclass(frozen=True)
class Measured:
    """The passes of one index."""

    method: Method
    units: list[Unit]
    coverage: Coverage
    met: set[str]  # parameters whose covariances are gathered on the way
    size: int  # examples in a pass
    rows: int | None  # the same of rows, where a task makes several of an example
    projection: int  # bytes of its matrices
    checking: Cost  # of a few examples against autograd
    features: Cost


@dataclass(frozen=True)
class Passes:
    """All passes of a run, those to compare with included."""

    weights: int  # bytes of the model
    trained: int  # bytes of the parameters that a training step moves
    plain: Cost  # forward and backward with weight gradients
    frozen: Cost  # the same without
    own: Measured
    probe: Measured | None  # of the other measurement that the kernel is made of, if there is one
    directions: Directions | None  # of pca, which both are projected on


def measure(
    model: nn.Module,
    task: Task,
    batches: Batches,
    names: Sequence[str],
    method: Method,
    examples: int,
    memory: int,
) -> Passes:
    step = step_of(task, method, 0)  # reads a schedule, whose numbers are real
    with no_numbers(), _quiet(), _new_objects_alone():
        try:
            return _Run(without_numbers(model), task, step, batches, names, examples, memory).all(method)
        except UndeError:
            raise
        except FAILURES as e:
            raise UndeError(
                f"the {type(model).__name__} cannot run on shapes alone ({type(e).__name__}: {e}). Check that the "
                "batch is like those of the task; if the model looks at values to decide what to compute, build an "
                "index of a few hundred examples and scale up"
            ) from e


@dataclass
class _Run:
    model: nn.Module  # without numbers
    task: Task
    step: Task  # as the passes of features have it
    batches: Batches
    names: Sequence[str]
    examples: int
    memory: int  # the budget
    meter: Meter = field(default_factory=Meter)

    def all(self, method: Method) -> Passes:
        model, parameters = self.model, list(self.model.named_parameters())
        weights = self.meter.hold([*model.parameters(), *model.buffers()])
        trained = sum(p.nbytes for _, p in parameters if p.requires_grad)
        brief = recut(self.task, self.task.cutting.brief())
        self._cost(lambda batch: floor.plain(model, brief, [batch]), 1)  # fails where values decide what runs
        own = self._index(method)
        probe = None if method.probe is None else self._index(self._probe(method.probe))
        task = resized(self.task, own.rows)
        plain = self._cost(lambda batch: floor.plain(model, task, [batch]), own.size)
        for name, p in parameters:
            p.requires_grad_(name in self.names)  # the backward pass ends where the first attributed one is
        step = resized(self.step, own.rows)
        frozen = self._cost(lambda batch: floor.frozen(model, step, [batch]), own.size)
        directions = self._directions(own) if Spec.parse(str(method.projection)).kind == "pca" else None
        return Passes(weights, trained, plain, frozen, own, probe, directions)

    def _probe(self, probe: Method) -> Method:
        """With as many labels as the task has."""
        return probe.settle(self.task, self.model, self.batches(1)) if isinstance(probe, Fisher) else probe

    def _index(self, method: Method) -> Measured:
        """Settled in the order of a build."""
        spec = Spec.parse(str(method.projection))
        units = undrawn_units(self.model, self.names, str(spec))
        projection = self.meter.hold(matrices(units))
        coverage, checking = self._covered(units, method)
        described = [{"name": u.name, "shape": u.shape} for u in units]
        sizes = gathered(described, str(spec)) if method.factors else None
        what = Measurement(units, method.measure, method.beside, sizes)
        size, rows = self._settled(self.step, what, coverage)
        met = self._met(self.step, what, coverage)
        features = self._pass(resized(self.step, rows), what, coverage, size)
        return Measured(method, units, coverage, met, size, rows, projection, checking, features)

    def _covered(self, units: list[Unit], method: Method) -> tuple[Coverage, Cost]:
        gc.collect()  # what it would free in between is none of the check's
        before = self.meter.live
        self.meter.restart()
        with self.meter:
            coverage = covered(self.model, self.task, self.batches, units, method.measure)
        return coverage, Cost(self.meter.flops, self.meter.peak - before)

    def _settled(self, task: Task, what: Measurement, coverage: Coverage) -> tuple[int, int | None]:
        given = None, lambda several: self.batches(len(several)), self.examples, what, coverage, self.memory
        with Meter():  # answers for fake tensors whether they are equal
            return settle_on(self.model, task, *given)

    def _directions(self, own: Measured) -> Directions:
        """Last of all: it changes the projections."""
        rank, coverage = Spec.parse(str(own.method.projection)).size, own.coverage
        sides = {u.name: sides_of(u, rank, coverage.uses) for u in own.units}
        for u in own.units:
            u.projection.widen(*(n is not None for n in sides[u.name]))
        wide = {name: pair for name, pair in sides.items() if any(pair)}
        what = Measurement(own.units, own.method.measure, factors=wide, emit=False)
        size, rows = self._settled(self.task, what, coverage)
        met = self._met(self.task, what, coverage)
        cost = self._pass(resized(self.task, rows), what, coverage, size)
        made = {
            f"{side}/{name}": torch.empty(rank, n, device="meta")
            for name, pair in wide.items()
            for side, n in zip(("rows", "cols"), pair)
            if n is not None and name in met
        }
        return Directions(size, rows, cost, made)

    def _met(self, task: Task, what: Measurement, coverage: Coverage) -> set[str]:
        """The parameters that come to covariances: others go another way, and theirs stay zero."""
        if what.factors is None:
            return set()
        seen = _Names(self.model)
        brief = recut(task, task.cutting.brief())
        with Meter(), FeaturePass(self.model, brief, what, coverage) as run:
            run.collect.factors = seen
            run.collect(self.batches(1), [0])
        return seen.met & set(what.factors)

    def _pass(self, task: Task, what: Measurement, coverage: Coverage, size: int) -> Cost:
        def run(batch: Any) -> None:
            with FeaturePass(self.model, task, what, coverage) as made:
                made.collect(batch, list(range(size)))

        return self._cost(run, size)

    def _cost(self, run: Callable[[Any], None], size: int) -> Cost:
        gc.collect()  # hooks and graphs hold each other in circles
        before = self.meter.live
        batch = self.batches(size)
        self.meter.hold(tensors(batch))
        self.meter.restart()
        with self.meter:
            run(batch)
        return Cost(self.meter.flops, self.meter.peak - before)


class _Names(Factors):
    """Notes whose factors come, and adds up nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__({}, *placement(model))
        self.met: set[str] = set()

    def add(self, name: str, left: Tensor, right: Tensor, mask: Any) -> None:
        self.met.add(name)


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


@contextmanager
def _new_objects_alone() -> Generator[None]:
    """Inside, collecting garbage looks at what was made since: torch and its kin hold a million objects that stay."""
    if gc.get_freeze_count():  # somebody else's
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
