"""Plan of an index: disk from shapes, minutes and peak memory from a few timed passes of the real model."""

from __future__ import annotations

import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unde import methods
from unde.console import counted, duration, size
from unde.data import Collate, Rows, choose_collate, parse_bytes
from unde.errors import UndeError
from unde.gradients import Coverage, make_units, placement
from unde.gradients.feature_pass import FeaturePass, split_range
from unde.gradients.statistics import SAMPLE
from unde.groups import Groups, trainable, unwrap_compiled
from unde.index.choice import MethodChoice, choose
from unde.index.feature_runner import FeatureRunner
from unde.index.shard_writer import PACKED_BYTES
from unde.index.sizes import UNMEASURED, IndexSizes
from unde.kernels.base import BoundKernel
from unde.methods import Method
from unde.parallel.model_transport import ModelInputs
from unde.projection import WHOLE, Spec
from unde.store import factored
from unde.store.manifest import Manifest
from unde.tasks.base import Task

PASSES, SECONDS = 3, 10.0  # passes that are timed, and when to stop earlier
_LOOP = "one backward pass for each example"


@dataclass(frozen=True)
class GroupSize:
    """How many parameters a group has, and how long its part of a feature is."""

    parameters: int
    features: int


@dataclass(frozen=True)
class Timing:
    """What a few passes of the real model took on this machine."""

    pass_size: int  # examples that go through the model together
    routes: dict[str, int]  # how many parameter tensors go which way
    preparation: float  # seconds of the check against autograd and of choosing the pass size
    seconds: float  # for each example, of all measurements and terms of one checkpoint
    memory: int  # bytes: the most this process has held, interpreter and model included, and a shard
    device_memory: int  # bytes: the same on a GPU, 0 without one


@dataclass(frozen=True)
class Plan:
    """What a build takes: bytes on disk, bytes in memory, minutes. `print` shows it as tables.

    Args:
        disk: Bytes by kind of file, the kernel of the method included.
        kernel_memory: Bytes that fitting the kernel holds at once.
        sample_passes: Passes over a sample before the index is begun, for whitening.
        timing: What was measured; None for a model without weights, or without data.
        choice: What "auto" chose, and why.
    """

    model: str
    dtype: str
    method: dict[str, Any]
    examples: int
    checkpoints: int
    store_dtype: str
    shards: int
    workers: int
    groups: dict[str, GroupSize]
    disk: dict[str, int]
    kernel_memory: int
    sample_passes: int = 0
    timing: Timing | None = None
    choice: MethodChoice | None = None
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(g.parameters for g in self.groups.values())

    @property
    def features(self) -> int:
        return sum(g.features for g in self.groups.values())

    @property
    def bytes_on_disk(self) -> int:
        return sum(self.disk.values())

    @property
    def memory(self) -> int | None:
        """Peak bytes of one process that builds, None where no pass was run."""
        return None if self.timing is None else self.timing.memory

    @property
    def minutes(self) -> float | None:
        """Of the build with `workers`, each as fast as this machine; None where no pass was run."""
        return self.minutes_with(self.workers)

    def minutes_with(self, workers: int) -> float | None:
        """Of the build with so many workers: shards are dealt out evenly, the preparation is one worker's."""
        if self.timing is None:
            return None
        share = -(-self.shards // workers) / self.shards
        sample = self.sample_passes * min(SAMPLE, self.examples)
        passes = self.checkpoints * self.timing.seconds * (sample + self.examples * share)
        return (self.checkpoints * self.timing.preparation + passes) / 60

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and names, sums included."""
        names = ("parameters", "features", "bytes_on_disk", "memory", "minutes")
        choice = self.choice or MethodChoice(methods.parse(self.method))
        return asdict(replace(self, choice=None)) | {
            "totals": {name: getattr(self, name) for name in names},
            "choice": list(choice.words),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        disk = [(name, size(n)) for name, n in self.disk.items()]
        checkpoints = f", {self.checkpoints} checkpoints" if self.checkpoints > 1 else ""
        title = (
            f"{self.model} in {self.dtype}: {self.examples:,} examples{checkpoints}; "
            f"{self.method['name']}, {self.method['projection']}, stored in {self.store_dtype}"
        )
        tables = (
            [("groups", "parameters", "features"), *self._group_rows()],
            [("on disk", "bytes"), *disk, ("all", size(self.bytes_on_disk))],
            [("build", ""), *self._build_rows()],
        )
        chosen = list(self.choice.lines(self.minutes)) if self.choice is not None else []
        return "\n\n".join(["\n".join([title, *chosen]), *("\n".join(align(t)) for t in tables)]) + "".join(
            f"\n\nnote: {note}" for note in self.notes
        )

    def _group_rows(self) -> list[tuple[str, ...]]:
        """Groups whose names differ in a number only share a row."""
        sums: dict[str, list[int]] = {}
        for name, group in self.groups.items():
            row = sums.setdefault(re.sub(r"\d+", "*", name), [0, 0, 0])
            for i, value in enumerate((1, group.parameters, group.features)):
                row[i] += value
        rows = [(f"{n} × {name}" if n > 1 else name, f"{p:,}", f"{f:,}") for name, (n, p, f) in sums.items()]
        return [*rows, (f"all {len(self.groups)}", f"{self.parameters:,}", f"{self.features:,}")]

    def _build_rows(self) -> list[tuple[str, str]]:
        kernel = ("memory to fit the kernel", size(self.kernel_memory))
        t = self.timing
        if t is None or self.minutes is None:
            return [kernel]
        routes = ", ".join(f"{count} by {route}" for route, count in t.routes.items())
        device = [("peak memory on the device", size(t.device_memory))] if t.device_memory else []
        return [
            (f"time, {counted(self.workers, 'worker')}", duration(60 * self.minutes)),
            ("peak memory of a process", size(t.memory)),
            *device,
            kernel,
            ("examples in a pass", f"{t.pass_size:,}"),
            *([("passes over a sample before", f"{self.sample_passes:,}")] if self.sample_passes else []),
            ("parameter tensors", routes),
        ]


def align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of columns under a rule, the first to the left and the others to the right.

    >>> align([("file", "bytes"), ("probe", "7")])
    ['file   bytes', '------------', 'probe      7']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = (c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return [line(rows[0]), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(line, rows[1:])]


def plan(
    model: nn.Module,
    task: Task,
    train_data: Any = None,
    *,
    n_examples: int | None = None,
    method: str | Method = "auto",
    projection: str = "auto",
    groups: Groups | str | Mapping[str, str] = "layer",
    batch_size: int | None = None,
    checkpoints: int = 1,
    exclude: Sequence[str] = (),
    collate: Collate | None = None,
    store_dtype: str = "auto",
    disk: int | str = "20GB",
    memory: int | str = "2GB",
    workers: int = 1,
) -> Plan:
    """Tell what `Index.build` will take: disk, peak memory and minutes.

    Bytes on disk follow from shapes. Minutes and memory are measured: a few passes of the features are run on examples
    of `train_data`, by the code of the build.

    Args:
        model: The trained model. Without weights (on the meta device) only bytes on disk and of the kernel are told.
        task: What the model was trained on.
        train_data: The training data or some of it, as for `Index.build`; None for bytes alone.
        n_examples: How many examples the index will have, by default those of `train_data`.
        checkpoints: How many there are.
        workers: How many processes or machines build, each as fast as this one.

    The other arguments are those of `Index.build`.

    Returns:
        The plan: `.disk`, `.memory`, `.minutes`, `.as_dict()`; `print` shows it.

    Raises:
        UndeError: An argument is out of range, or the model does not run on its data.

    >>> model = nn.Linear(4, 3)
    >>> from unde.tasks import Classification
    >>> data = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> estimate = plan(model, Classification(), data, n_examples=1000, method="tracin")
    >>> estimate.features, estimate.disk["features"]
    (15, 60000)
    """
    model = unwrap_compiled(model)
    rows = None
    if train_data is not None:
        rows = Rows(train_data, collate or choose_collate(task.collate, train_data))
    elif n_examples is None:
        raise UndeError("expected train_data, or n_examples: how many training examples there will be")
    count = n_examples if n_examples is not None else len(rows or ())
    counts = {"n_examples": count, "checkpoints": checkpoints, "workers": workers, "batch_size": batch_size}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UndeError(f"{name} {value}: expected at least 1")
    if any(p.is_meta for p in model.parameters()):
        rows = None  # no pass can be run
    names, partition = trainable(model, exclude), Groups.parse(groups, model, exclude)
    partition.of(names)
    sizes = IndexSizes(
        model, task, rows, names, count, checkpoints, partition, store_dtype, parse_bytes(memory)
    )
    choice = choose(method, projection, sizes, parse_bytes(disk, "disk"))
    chosen = choice.method
    if chosen.steps > 1 and checkpoints > 1:
        raise UndeError(f"{chosen} sums over steps of trajectories: it takes one checkpoint")
    factored.check(store_dtype, str(chosen.projection))
    timing = None if rows is None else _time_passes(sizes, chosen, rows, batch_size)
    files = sizes.files(chosen, batch_size if timing is None else timing.pass_size)
    index = files.index
    units = {u["name"]: u for u in index.units}
    if timing is not None:
        timing = replace(timing, memory=timing.memory + _shard_memory(index))
    return Plan(
        model=type(model).__name__,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        method=chosen.describe(),
        examples=count,
        checkpoints=checkpoints,
        store_dtype=index.store_dtype,
        shards=index.terms * len(index.shards),
        workers=workers,
        groups={
            name: GroupSize(
                sum(math.prod(units[n]["shape"]) for n in members), sum(units[n]["size"] for n in members)
            )
            for name, members in index.groups.items()
        },
        disk=files.bytes,
        kernel_memory=files.bound.needs().memory,
        sample_passes=sizes.sample_passes(index),
        timing=timing,
        choice=choice,
        notes=tuple(_notes(files.bound, sizes.memory, timing)),
    )


def _notes(bound: BoundKernel, memory: int, timing: Timing | None) -> Iterator[str]:
    try:
        bound.check(memory)
    except UndeError as e:
        yield f"the kernel would stop with an error: {e}"
    if timing is None:
        yield "minutes and peak memory are measured where the model has weights and there is data"
    elif _LOOP in timing.routes:
        yield "parameters that need one backward pass for each example make the pass slow"


def _time_passes(sizes: IndexSizes, method: Method, rows: Rows, batch_size: int | None) -> Timing:
    """A few passes of the index, and of the labels that its kernel is made of."""
    device, timings = placement(sizes.model)[0], list[Timing]()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for part in sizes.parts(method):
        start = time.perf_counter()
        manifest = replace(sizes, checkpoints=1).manifest(method, part, UNMEASURED)
        runner = FeatureRunner(Path(), manifest, ModelInputs(sizes.model, sizes.task))
        runner.units = make_units(sizes.model, sizes.names, str(part.projection), manifest.seed)
        runner.manifest = runner.choose_passes(rows, sizes.memory)
        pass_size = batch_size or runner.manifest.resolved.pass_size
        preparation = time.perf_counter() - start
        try:
            seconds = part.terms * _seconds(runner.open_pass(0), rows, pass_size)
        finally:
            runner.close()
        timings.append(Timing(pass_size, _routes(runner.coverage(0)), preparation, seconds, 0, 0))
    return replace(
        timings[0],
        preparation=sum(t.preparation for t in timings),
        seconds=sum(t.seconds for t in timings),
        memory=peak_memory(),
        device_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )


def _shard_memory(m: Manifest) -> int:
    """Bytes of a shard beside its passes, computed and packed; whole gradients are packed by the group, and joined."""
    rows = min(m.examples, m.resolved.shard_size)
    if Spec.parse(str(m.method["projection"])).kind not in WHOLE:
        return 2 * 4 * m.width * rows
    joined = 4 * m.width * rows > max(PACKED_BYTES, 4 * m.width * m.resolved.pass_size)
    copies = 2 if joined else 1 if m.store_dtype != "float32" else 0
    return copies * m.codec.nbytes(rows, m.columns)


def _seconds(run: FeaturePass, rows: Rows, pass_size: int) -> float:
    """Of one example in passes, data loading included; a first pass that is fast only warms up."""
    seconds, examples, warm = 0.0, 0, False
    for where in cycle(split_range(range(len(rows)), pass_size)):
        start = time.perf_counter()
        deque(run.over(rows.batches([where])), maxlen=0)  # no features stay while the next are computed
        taken = time.perf_counter() - start
        if not warm and taken < SECONDS:
            warm = True
            continue
        seconds, examples = seconds + taken, examples + len(where)
        if examples >= PASSES * pass_size or seconds >= SECONDS:
            break
    return seconds / examples


def _routes(c: Coverage) -> dict[str, int]:
    hooked = {u.name for use in c.modules for u in use.units.values()}
    counts = {
        "layer rules": len(hooked),
        "one copy for each example": len(c.expanded),
        "torch.func.vmap": len(c.vmapped),
        _LOOP: len(c.looped),
        "no gradient": len(c.unused),
    }
    return {route: count for route, count in counts.items() if count}


def peak_memory() -> int:
    """The most bytes that this process has held since it started; 0 where the system does not tell."""
    if sys.platform == "linux":
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
