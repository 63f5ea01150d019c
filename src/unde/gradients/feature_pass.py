"""The feature pass: run a measurement of a model over rows, in passes of a chosen size.

Builds, queries, whitening, perturbed copies and plans all use it. The last bits of features depend on the
coverage and on the number of examples in a pass (`choose_pass_size`): both are chosen once and recorded.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import Rows, evenly, to_device
from unde.devices import mark, name_memory, release_cache
from unde.gradients.collector import Collector
from unde.gradients.factors import Factors
from unde.gradients.hooks import Coverage
from unde.gradients.meter import PassCost
from unde.gradients.parameters import Unit, placement
from unde.tasks.base import Task, with_batching

SAMPLED = 64  # examples among which the largest is sought
LEAST, MOST = 8, 256  # examples in a pass, if they fit
SHARE = 2  # a pass may take 1/SHARE of the memory budget: shards need the rest
_CALL = 1e-5  # seconds to call an operation, about
_SPEED = {"cpu": 1e11, "cuda": 2e13}  # operations a second, about
_WORTH = 40  # a pass is large enough if its work takes this many times as long as its calls

Batch = tuple[Sequence[int], Any, list[str]]  # positions, collated examples, digests
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Measurement:
    """What is computed of every example: the gradient of `measure` under the projections of `units`.

    `extra_measures` are not differentiated. `factors` gives the sizes of covariances to add up; with emit=False nothing
    else is computed but gradients of tables that are looked up, whose covariances are those of whole gradients.
    """

    units: Sequence[Unit]
    measure: str = "loss"
    extra_measures: tuple[str, ...] = ()
    factors: Mapping[str, tuple[int | None, int | None]] | None = None
    emit: bool = True

    @property
    def emitted(self) -> Sequence[Unit]:
        """The units with features, in consecutive columns."""
        if self.emit:
            return self.units
        out, start = list[Unit](), 0
        for u in self.units:
            if u.lookup and self.factors and u.name in self.factors:
                stop = start + u.stop - u.start
                out.append(replace(u, start=start, stop=stop))
                start = stop
        return out


@dataclass(frozen=True)
class PassResult:
    """The results of one pass."""

    where: Sequence[int]
    features: Tensor  # (n, D) float32, on the CPU like the others
    values: Tensor  # (n,)
    extra: Tensor  # (n, ·)
    digests: list[str]
    factors: Tensor | None = None  # the covariances of this pass, if they are taken pass by pass


@contextmanager
def exclusive(model: nn.Module) -> Generator[None]:
    """Allow one thread at a time: passes put hooks on the model."""
    with _locks.setdefault(model, threading.RLock()):
        yield


class FeaturePass:
    """Inside a `with` block, a measurement that is ready to run: the model is hooked, and restored afterwards.

    `factors` are running sums to add to; by default new ones.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        what: Measurement,
        coverage: Coverage,
        factors: Factors | None = None,
    ) -> None:
        self.model = model
        if factors is None and what.factors is not None:
            factors = Factors(what.factors, model)
        self.factors = factors
        self._scales = [(u.columns, u.scale) for u in what.emitted if u.scale is not None]
        self.collect = Collector(
            model, task, what.emitted, coverage, what.measure, self.factors, what.extra_measures
        )

    def __enter__(self) -> FeaturePass:
        with ExitStack() as stack:
            stack.enter_context(exclusive(self.model))
            stack.enter_context(self.collect)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def scale(self, features: Tensor) -> Tensor:
        """Features (n, D) of the collector times the scales of their units, in place."""
        for columns, scale in self._scales:
            features[:, columns].mul_(scale.to(features))
        return features

    def over(
        self, batches: Iterable[Batch], outs: Iterable[Tensor | None] | None = None, take: bool = False
    ) -> Iterator[PassResult]:
        """Run batch after batch, each as one pass; features go to the rows of `outs`, one of them for each pass. `take`
        gives out the covariances of each pass, which otherwise add up.

        On a device the next pass is begun before a result is given out: reading and writing overlap with it.
        """
        remaining = zip(batches, repeat(None) if outs is None else outs)
        waiting: Callable[[], PassResult] | None = None
        while True:
            try:
                following = next(remaining, None)
                begun = None if following is None else self._begin(*following, take)
            except Exception:
                if waiting is not None:  # an earlier pass, which went well
                    yield waiting()
                raise
            following = None
            if waiting is not None:
                yield waiting()
            if begun is None:
                return
            waiting, begun = begun, None
            if self.collect.device.type == "cpu":
                yield waiting()
                waiting = None

    def _begin(self, batch: Batch, out: Tensor | None, take: bool) -> Callable[[], PassResult]:
        """Begin a pass; the function that is returned waits for its results."""
        (where, examples, digests), collect = batch, self.collect
        direct = out is not None and (out.device, out.dtype) == (collect.device, collect.dtype)
        moved = to_device(collect.task.batching.prepare(examples), collect.device)
        features, values = collect(moved, list(where), out if direct else None)
        self.scale(features)
        found = {"features": features.float(), "values": values.float()}
        if collect.extra.shape[1]:
            found["extra"] = collect.extra.float()
        if self.factors is not None and take:
            found["factors"] = self.factors.take()
        down = {name: t.to("cpu", non_blocking=True) for name, t in found.items()}
        finished = mark(collect.device)

        def finish() -> PassResult:
            finished()
            features = down["features"] if out is None or direct else out.copy_(down["features"])
            extra = down.get("extra", torch.empty(len(where), 0))
            return PassResult(where, features, down["values"], extra, digests, down.get("factors"))

        return finish


def split_range(rows: range, size: int) -> list[range]:
    """Split positions into passes of `size`.

    >>> split_range(range(5), 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [rows[a : a + size] for a in range(0, len(rows), size)]


def choose_pass_size(
    model: nn.Module,
    task: Task,
    rows: Rows,
    what: Measurement,
    coverage: Coverage,
    memory: int,
) -> tuple[int, int | None]:
    """The number of examples in a pass, and of rows where the task makes several of an example (else None).

    A pass of two copies of the largest example gives the cost; where memory is scarce, a pass of one gives the cost of
    each further example, and a pass of the resulting size is tried.
    """
    device, _ = placement(model)
    budget, count = _pass_budget(memory, what, device), len(rows)
    at = largest(rows)
    example = rows[at]
    with name_memory(device), FeaturePass(model, task, replace(what, factors=None), coverage) as run:
        collect = run.collect
        collect.fit(budget, rows.collate([example]))
        batching = collect.task.batching
        if batching.row_limit is not None:  # its passes are cut by rows, whatever the number of examples
            return max(1, min(batching.examples_per_pass, MOST, count)), batching.row_limit

        def cost(n: int) -> PassCost:
            with collect.meter() as meter:
                collect(to_device(rows.collate([example] * n), device), [at] * n)
            return meter.cost(n)

        before, last = None, cost(1)
        while (n := _next_trial(before, last, budget, count, device)) > last.examples:
            try:
                tried = cost(n)
            except torch.OutOfMemoryError:
                release_cache(device)
                break
            if tried.peak > budget:
                break
            size = min(_least_worthwhile(tried, device), MOST, count)
            if n == 2 and max(size, n) * tried.peak <= n * budget:  # memory grows no faster than the examples
                return size, None
            before, last = last, tried
        return last.examples, None


def _next_trial(
    before: PassCost | None, last: PassCost, budget: int, count: int, device: torch.device
) -> int:
    """How many examples to try after passes of fewer, so that no trial takes more than the budget: what fits if bytes
    go on to grow as they did, at most twice as many."""
    if before is None:
        return 2 if 2 * last.peak <= budget and count > 1 else 1
    each = max(1, (last.peak - before.peak) // (last.examples - before.examples))
    fits = last.examples + max(0, budget - last.peak) // each
    return min(fits, 2 * last.examples, _least_worthwhile(last, device), MOST, count)


def _pass_budget(memory: int, what: Measurement, device: torch.device) -> int:
    """Bytes of one pass: on the CPU shards need the rest; on a device, what stays there between passes."""
    if device.type == "cpu":
        return max(1, memory // SHARE)
    stays = sum(t.nbytes for u in what.units for t in u.projection.tensors)
    stays += sum(8 * n * n for pair in (what.factors or {}).values() for n in pair if n is not None)
    return max(1, memory - stays)


def _least_worthwhile(seen: PassCost, device: torch.device) -> int:
    """The number of examples from which on calling operations takes little of the time."""
    speed = _SPEED.get(device.type, _SPEED["cuda"])
    flops = max(1, seen.flops // seen.examples)
    return max(LEAST, math.ceil(_WORTH * seen.calls * _CALL * speed / flops))


def largest(rows: Rows) -> int:
    """The position of the example with the most numbers, among some that are spread over the data."""
    return max(evenly(len(rows), SAMPLED), key=lambda i: count_numbers(rows[i]))


def count_numbers(example: Any) -> int:
    """How many numbers, or characters, an example holds."""
    if isinstance(example, Mapping):
        return sum(count_numbers(v) for v in example.values())
    if isinstance(example, (list, tuple)):
        return sum(count_numbers(v) for v in example)
    if isinstance(example, Tensor):
        return example.numel()
    if isinstance(example, str):
        return len(example)
    size = getattr(example, "size", 1)  # of arrays a number, of images their sides
    return math.prod(size) if isinstance(size, tuple) else int(size)


def set_rows(task: Task, rows: int | None) -> Task:
    """The task with this number of rows in a pass."""
    return task if rows is None else with_batching(task, task.batching.with_rows(rows))


@contextmanager
def torch_threads(count: int | None) -> Generator[None]:
    """Set torch's threads inside the block: the last bits of sums depend on their number."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
