"""The one feature pass: a measurement of a model that is run over rows, in passes of a settled size.

Builds, queries, directions of pca, perturbed copies and plans all come through here. What the last bits of features
depend on is settled once (`settle`): which way each parameter goes, and how many examples are in a pass.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unde.data import Rows, evenly, to_device
from unde.gradients.collector import Collector, Coverage
from unde.gradients.factors import Factors
from unde.gradients.meter import Meter, PassCost
from unde.gradients.parameters import Unit, placement
from unde.tasks.base import Task
from unde.tasks.batching import with_batching

LOOKED_AT = 64  # examples, the largest of which tells what a pass takes
LEAST, MOST = 8, 256  # examples in a pass, if they fit
SHARE = 2  # of the memory budget a pass may take one in so many: shards are there meanwhile
_CALL = 1e-5  # seconds that calling an operation takes, about
_SPEED = {"cpu": 1e11, "cuda": 2e13}  # operations a second, about
_WORTH = 40  # a pass is large enough where its work takes so many times as long as its calls

Batch = tuple[Sequence[int], Any, list[str]]  # positions, what was collated of them, digests
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Measurement:
    """What is taken of every example: the gradient of `measure` under the projections of `units`.

    `beside` names measures whose values are kept, undifferentiated. `factors` gives the sizes of covariances that are
    gathered on the way; with emit=False nothing else is.
    """

    units: Sequence[Unit]
    measure: str = "loss"
    beside: tuple[str, ...] = ()
    factors: Mapping[str, tuple[int | None, int | None]] | None = None
    emit: bool = True


@dataclass(frozen=True)
class PassResult:
    """Of one pass."""

    where: Sequence[int]
    features: Tensor  # (n, D) float32, on the CPU like all the others
    values: Tensor  # (n,)
    beside: Tensor  # (n, ·)
    digests: list[str]


@contextmanager
def exclusive(model: nn.Module) -> Generator[None]:
    """One thread at a time: passes put hooks on the model."""
    with _locks.setdefault(model, threading.RLock()):
        yield


class FeaturePass:
    """Inside a `with` block, a measurement that is ready to run: the model is hooked, and as it was afterwards.

    Without `many` examples to come, weights are not put into the order that is fastest: that takes as long as a pass.
    """

    def __init__(
        self, model: nn.Module, task: Task, what: Measurement, coverage: Coverage, many: bool = True
    ) -> None:
        self.model, self.task, self.what, self.coverage, self.many = model, task, what, coverage, many
        self.factors = None if what.factors is None else Factors(what.factors, *placement(model))

    def __enter__(self) -> FeaturePass:
        w = self.what
        with ExitStack() as stack:
            stack.enter_context(exclusive(self.model))
            made = Collector(
                self.model,
                self.task,
                w.units,
                self.coverage,
                w.measure,
                self.factors,
                w.emit,
                w.beside,
                self.many,
            )
            self.collect = stack.enter_context(made)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def over(self, batches: Iterable[Batch], out: Tensor | None = None) -> Iterator[PassResult]:
        """Batch after batch, each as one pass; features in the rows of `out` one after the other, if it is given."""
        collect, at = self.collect, 0
        for where, batch, digests in batches:
            rows = None if out is None else out[at : at + len(where)]
            at += len(where)
            direct = rows is not None and (rows.device, rows.dtype) == (collect.device, collect.dtype)
            features, values = collect(
                to_device(batch, collect.device), list(where), rows if direct else None
            )
            if rows is not None and not direct:
                features = rows.copy_(features)
            beside = collect.beside.float().cpu()
            yield PassResult(where, features.float().cpu(), values.float().cpu(), beside, digests)


def cuts(rows: range, size: int) -> list[range]:
    """Positions in passes of `size`.

    >>> cuts(range(5), 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [rows[a : a + size] for a in range(0, len(rows), size)]


def settle(
    model: nn.Module,
    task: Task,
    rows: Rows,
    what: Measurement,
    coverage: Coverage,
    memory: int,
    seen: PassCost | None = None,
) -> tuple[int, int | None]:
    """How many examples a pass has, and how many rows where the task makes several of an example (else None). `seen` is
    what a pass of the largest examples took, if there was one."""
    size = None if seen is None else _plenty(seen, memory, len(rows), placement(model)[0])
    if size is not None:
        return size, None
    at = largest(rows)
    return settle_on(model, task, rows[at], rows.collate, len(rows), what, coverage, memory, at)


def settle_on(
    model: nn.Module,
    task: Task,
    example: Any,
    collate: Callable[[list[Any]], Any],
    count: int,
    what: Measurement,
    coverage: Coverage,
    memory: int,
    at: int = 0,
) -> tuple[int, int | None]:
    """The same from one example, the one `at` a position. A pass of it twice tells what an example costs; where memory
    is scarce, one of it alone tells what an example takes, and a pass of the size that they promise is tried."""
    device, _ = placement(model)
    budget = max(1, memory // SHARE)
    with FeaturePass(model, task, replace(what, factors=None), coverage) as run:
        collect = run.collect
        collect.fit(budget, collate([example]))
        batching = collect.task.batching
        if batching.row_limit is not None:  # its passes are cut by rows, whatever the number of examples
            return max(1, min(batching.examples_per_pass, MOST, count)), batching.row_limit

        def cost(n: int) -> PassCost:
            batch = to_device(collate([example] * n), device)
            with Meter() as meter:
                collect(batch, [at] * n)
            return meter.cost(n)

        both = cost(2)
        size = _plenty(both, memory, count, device)
        if size is not None:
            return size, None
        alone = cost(1)
        fits = 1 + max(0, budget - alone.peak) // max(1, both.peak - alone.peak)
        size = max(1, min(fits, _worth(both, device), MOST, count))
        while size > 2 and (taken := cost(size).peak) > budget:
            size = max(1, min(size - 1, size * budget // taken))
        return size, None


def _plenty(seen: PassCost, memory: int, count: int, device: torch.device) -> int | None:
    """How many examples a pass has where memory is no matter: what a pass takes grows no faster than its examples. None
    where so many may not fit."""
    size = min(_worth(seen, device), MOST, count)
    fits = max(size, seen.examples) * seen.peak <= seen.examples * max(1, memory // SHARE)
    return size if fits else None


def _worth(seen: PassCost, device: torch.device) -> int:
    """Examples from which on calling operations takes little beside their work."""
    speed = _SPEED.get(device.type, _SPEED["cuda"])
    flops = max(1, seen.flops // seen.examples)
    return max(LEAST, math.ceil(_WORTH * seen.calls * _CALL * speed / flops))


def largest(rows: Rows) -> int:
    """Where the example with the most numbers in it is, of some that are spread over the data."""
    return max(evenly(len(rows), LOOKED_AT), key=lambda i: count_numbers(rows[i]))


def count_numbers(example: Any) -> int:
    """How many numbers, or characters, an example holds."""
    if isinstance(example, Mapping):
        return sum(count_numbers(v) for v in example.values())
    if isinstance(example, (list, tuple)):
        return sum(count_numbers(v) for v in example)
    if isinstance(example, Tensor):
        return example.numel()
    size = getattr(example, "size", 1)  # of arrays a number, of pictures their sides
    return (
        len(example)
        if isinstance(example, str)
        else math.prod(size)
        if isinstance(size, tuple)
        else int(size)
    )


def resized(task: Task, rows: int | None) -> Task:
    """The task with the number of rows in a pass that was settled."""
    return task if rows is None else with_batching(task, task.batching.with_rows(rows))


@contextmanager
def threads(count: int | None) -> Generator[None]:
    """torch's threads inside the block: sums are cut by them, so last bits depend on their number."""
    own = torch.get_num_threads()
    if count is None or count == own:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(own)
