"""Cost of features: `Index.build` as a ratio to a plain training pass over the same examples.

Three passes are timed in turn, so that noise of the machine hits all of them:

    plain     forward and backward with all weights requiring grad: a lower bound of training
    build     the features of Index.build, in passes of the size that it chooses, writing included
    frozen    frozen weights and no features, in passes of that size: a lower bound of any feature pass

Planning (checks against autograd, fingerprints) happens once for an index and is reported separately.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unde import console
from unde.data import Rows, to_device
from unde.devices import device_of, synchronize
from unde.errors import UndeError
from unde.gradients import placement
from unde.gradients.collector import GraphStart
from unde.gradients.feature_pass import set_rows, split_range
from unde.gradients.layers import rule_for
from unde.gradients.meter import Meter, aten
from unde.gradients.model_state import frozen_eval
from unde.index import Index
from unde.methods import EKFAC, Method, TracIn
from unde.onednn import frozen_linears
from unde.setup import Setup
from unde.store.layout import LOG
from unde.tasks.base import Task
from unde.weights import learn_weights

QUERIES = 16  # of the stages


def median_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """A distribution-free 95 % interval of the median, by order statistics; the range of fewer than six values.

    >>> median_interval([5, 1, 4, 2, 3, 6]), median_interval(range(11))
    ((1.0, 6.0), (1.0, 9.0))
    """
    ordered, n = np.sort(np.asarray(values, dtype=float)), len(values)
    below, outside = 0.0, -1  # values outside at either end
    while outside + 2 <= (n + 1) // 2:
        below += math.comb(n, outside + 1) / 2**n
        if 1 - 2 * below < 0.95:
            break
        outside += 1
    at = max(0, outside)
    return float(ordered[at]), float(ordered[n - 1 - at])


def measure(setup: Setup, rank: int = 16, batch_size: int = 32, runs: int = 15, batches: int = 4) -> str:
    """Time the passes on the first batches of the training data, and report the cost; then what each stage of an index
    does on the model's device.

    Plain passes have `batch_size` examples, as in training. Data with fewer examples are repeated.
    """
    data = setup.rows(setup.train_data)
    rows = Rows([data[i % len(data)] for i in range(batches * batch_size)], data.collate)
    seconds: dict[str, list[float]] = {"plain": [], "frozen": [], "build": [], "planning": []}
    method = TracIn(projection=f"kron({rank})")
    settings: list[Any] = []

    def look(index: Index) -> None:
        settings.append(index.manifest.resolved)

    with console.progress("timing", runs + 1, unit="runs") as advance:
        for _ in range(runs + 1):
            start = time.perf_counter()
            took = build(setup, rows, method, look)
            seconds["build"].append(took)
            seconds["planning"].append(time.perf_counter() - start - took)
            seconds["plain"].append(passes(setup, rows, plain_pass, batch_size))
            size = settings[0].pass_size
            seconds["frozen"].append(passes(setup, rows, frozen_pass, size, settings[0].rows))
            advance(1)
    # The first run warms up.
    plain, frozen, built, planning = (np.array(s[1:]) for s in seconds.values())
    low, high = median_interval(built / plain)
    return (
        f"features cost {np.median(built / plain):.2f} of a plain pass [{low:.2f}, {high:.2f}]; the frozen floor is "
        f"{np.median(frozen / plain):.2f}, the overhead over it {np.median((built - frozen) / plain):.2f}; "
        f"{len(rows) / np.median(built):,.0f} examples/s after {np.median(planning):.1f} s of planning "
        f"({runs} interleaved runs over {len(rows)} examples)\n{describe_stages(setup, rank, len(rows))}"
    )


class Traffic(Meter):
    """Counts what a device does: operations, bytes that they read and write, copies from and to the host with their
    bytes, and how often the host waits for a number or a copy."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.operations = self.moved = self.copies = self.copied = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert self.device is not None
        before = self.flops
        out = super().__torch_dispatch__(func, types, args, kwargs)
        packet, kind = func._overloadpacket, self.device.type
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not any(t.device.type == kind for t in (*given, *made)):
            self.flops = before  # of the host
            return out
        if packet in (aten._to_copy, aten.copy_) and len({t.device.type for t in (*given, *made)}) > 1:
            source = given[0] if packet is aten._to_copy else given[1]
            self.copies, self.copied = self.copies + 1, self.copied + source.nbytes
            self.waits += not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False))
            return out
        self.waits += packet in (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.bincount)
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not views and "empty" not in str(packet):
            self.operations += 1
            self.moved += sum(t.nbytes for t in (*given, *made))
        return out

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COUNTED}


COUNTED = ("operations", "flops", "moved", "copies", "copied", "waits")


def run_stages(setup: Setup, rank: int, count: int, around: Callable[[str], Any]) -> tuple[int, int]:
    """A build by EKFAC and questions to it, each stage inside `around(name)`; the numbers of examples and queries.

    The last examples of the data are the queries; the others are repeated if they are fewer than `count`.
    """
    data = setup.rows(setup.train_data)
    asked = max(1, min(QUERIES, len(data) // 4))
    there = max(1, len(data) - asked)
    rows = Rows([data[i % there] for i in range(count)], data.collate)
    queries = Rows([data[len(data) - 1 - i] for i in range(asked)], data.collate)
    method = EKFAC(projection=f"kron({rank})")

    def run(index: Index) -> None:
        size, runner = index.manifest.resolved.pass_size, index._state.runner
        with around("plain training pass"):
            passes(setup, rows, plain_pass, size)
        opened = runner.open_pass(0)
        with around("features"):
            for _ in opened.over(rows.batches(split_range(range(count), size))):
                pass
        runner.close()
        with around("kernel"):
            train = index._state.scorer.train_features(method)
            train.apply_kernel(0, torch.zeros(1, index.manifest.width, device=train.device))
        index.features(queries)  # the first time, weights are compared with those of the build
        with around("features of queries"):
            found = index.features(queries)
        scores = index.score(found)
        with around("total"):
            scores.total()
        with around("top"):
            scores.top(min(10, count))
        with around("self-influence"):
            index.self_influence()
        with (
            suppress(UndeError),
            around("weight learning"),
        ):  # one epoch; refused where queries repeat examples
            learn_weights(scores, k=min(5, count), epochs=1)

    with console.silent():
        build(setup, rows, method, run)
    return count, asked


def count_stages(setup: Setup, rank: int, count: int) -> dict[str, Traffic]:
    """What each stage does on the model's device."""
    found: dict[str, Traffic] = {}

    @contextmanager
    def counted(name: str) -> Generator[None]:
        with Traffic(device_of(setup.model)) as traffic:
            yield
        found[name] = traffic

    run_stages(setup, rank, count, counted)
    return found


def describe_stages(setup: Setup, rank: int, count: int) -> str:
    """A table of the stages with their speed, which is timed in a run that does not count."""
    found, seconds, device = count_stages(setup, rank, count), dict[str, float](), device_of(setup.model)

    @contextmanager
    def timed(name: str) -> Generator[None]:
        synchronize(device)
        start = time.perf_counter()
        yield
        synchronize(device)
        seconds[name] = time.perf_counter() - start

    examples, queries = run_stages(setup, rank, count, timed)
    head = ("", "operations", "GFLOP", "moved", "copies", "copied", "waits", "seconds", "GFLOP/s", "GB/s")
    rows = [head]
    for name, t in found.items():
        took = seconds[name]
        numbers = (f"{t.operations:,}", f"{t.flops / 1e9:,.3g}", console.size(t.moved), f"{t.copies:,}")
        speeds = (f"{took:.3g}", f"{t.flops / took / 1e9:,.3g}", f"{t.moved / took / 1e9:,.3g}")
        rows.append((name, *numbers, console.size(t.copied), f"{t.waits:,}", *speeds))
    wide = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])]) for row in rows]
    return f"{examples} examples and {queries} queries by EKFAC, rank {rank}, on {device}:\n" + "\n".join(
        lines
    )


def passes(
    setup: Setup, rows: Rows, run: Callable[..., None], size: int, rows_in_pass: int | None = None
) -> float:
    """Seconds of a plain or frozen pass over all rows, `size` examples at a time."""
    start = time.perf_counter()
    batches = (rows.batch(range(a, min(a + size, len(rows)))) for a in range(0, len(rows), size))
    run(setup.model, set_rows(setup.task, rows_in_pass), batches)
    return time.perf_counter() - start


def build(
    setup: Setup,
    data: Any,
    method: Method,
    use: Callable[[Index], Any] | None = None,
    memory: str = "2GB",
    store_dtype: str = "auto",
) -> float:
    """Seconds of the features of an index in a temporary folder; `use` is called with the index."""
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
            store_dtype=store_dtype,
            progress=False,
        )
        if use is not None:
            use(index)
        return json.loads((index.folder / LOG).read_text().splitlines()[-1])["seconds"]
    finally:
        shutil.rmtree(folder)


def plain_pass(model: nn.Module, task: Task, batches: Iterable[Any]) -> None:
    """Forward and backward with all weights requiring grad: what training costs at least."""
    device, _ = placement(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with frozen_eval(model):
        for p in trained:
            p.requires_grad_(True)
        for batch in batches:
            for p in trained:
                p.grad = None
            for part in task.batching.passes(to_device(batch, device), None):
                task.loss(model, part).sum().backward()


def frozen_pass(model: nn.Module, task: Task, batches: Iterable[Any]) -> None:
    """The same with frozen weights and no features: the floor under any feature pass."""
    device, _ = placement(model)
    anchor = torch.zeros((), device=device, requires_grad=True)

    def start_graph(_module: nn.Module, _args: Any, out: Tensor) -> Tensor | None:
        return None if out.requires_grad else GraphStart.apply(out, anchor)

    handles = [
        m.register_forward_hook(start_graph)
        for m in model.modules()
        if any(p.requires_grad for p in m.parameters(recurse=False)) and rule_for(m)
    ]
    try:
        # The floor under the pass that the build really runs.
        with frozen_eval(model), frozen_linears(model):
            for batch in batches:
                for part in task.batching.passes(to_device(batch, device), None):
                    loss = task.loss(model, part).sum()
                    torch.autograd.grad(loss, anchor, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
