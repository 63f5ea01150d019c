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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import console
from unde.data import Rows, to_device
from unde.devices import device_of
from unde.gradients import placement
from unde.gradients.collector import GraphStart
from unde.gradients.feature_pass import set_rows
from unde.gradients.layers import rule_for
from unde.gradients.meter import Meter, aten
from unde.gradients.model_state import frozen_eval
from unde.index import Index
from unde.methods import Method, TracIn
from unde.onednn import frozen_linears
from unde.setup import Setup
from unde.store.layout import LOG
from unde.tasks.base import Task


def median_interval(values: Sequence[float] | np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """A distribution-free confidence interval of the median, by order statistics; the range of fewer than six values.

    >>> median_interval([5, 1, 4, 2, 3, 6]), median_interval(range(11))
    ((1.0, 6.0), (1.0, 9.0))
    """
    ordered, n = np.sort(np.asarray(values, dtype=float)), len(values)
    below, outside = 0.0, -1  # values outside at either end
    while outside + 2 <= (n + 1) // 2:
        below += math.comb(n, outside + 1) / 2**n
        if 1 - 2 * below < level:
            break
        outside += 1
    at = max(0, outside)
    return float(ordered[at]), float(ordered[n - 1 - at])


def measure(setup: Setup, rank: int = 16, batch_size: int = 32, runs: int = 15, batches: int = 4) -> str:
    """Time the passes on the first batches of the training data, and report the cost in a sentence.

    Plain passes have `batch_size` examples, as in training. Data with fewer examples are repeated.
    """
    data = setup.rows(setup.train_data)
    rows = Rows([data[i % len(data)] for i in range(batches * batch_size)], data.collate)
    seconds: dict[str, list[float]] = {"plain": [], "frozen": [], "build": [], "planning": []}
    method = TracIn(projection=f"kron({rank})")
    settings: list[Any] = []
    cost: list[PassTraffic] = []

    def look(index: Index) -> None:
        settings.append(index.manifest.resolved)
        if not cost:
            cost.append(_traffic(index, rows))

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
    examples, each = settings[0].pass_size, np.median(built) / len(rows)
    return (
        f"features cost {np.median(built / plain):.2f} of a plain pass [{low:.2f}, {high:.2f}]; the frozen floor is "
        f"{np.median(frozen / plain):.2f}, the overhead over it {np.median((built - frozen) / plain):.2f}; "
        f"{len(rows) / np.median(built):,.0f} examples/s after {np.median(planning):.1f} s of planning "
        f"({runs} interleaved runs over {len(rows)} examples)\n"
        f"a pass of {examples} on {device_of(setup.model)}: {cost[0]}; "
        f"{cost[0].flops / examples / each / 1e9:,.1f} GFLOP/s over the build"
    )


class PassTraffic(Meter):
    """Also counts copies between the host and a device, their bytes, and how often the host waits for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.bytes = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        packet = func._overloadpacket
        if packet in (aten._to_copy, aten.copy_):
            source = args[0] if packet is aten._to_copy else args[1]
            if isinstance(source, Tensor) and source.device.type != out.device.type:
                self.copies, self.bytes = self.copies + 1, self.bytes + out.nbytes
        self.waits += packet in (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.bincount)
        return out

    def __str__(self) -> str:
        return (
            f"{self.flops / 1e9:,.3g} GFLOP in {self.calls:,} operations, {console.size(self.bytes)} in {self.copies} "
            f"copies between host and device, {self.waits} waits for a number"
        )


def _traffic(index: Index, rows: Rows) -> PassTraffic:
    """The cost of one pass of a build."""
    runner = index._state.runner
    here = range(min(len(rows), index.manifest.resolved.pass_size))
    try:
        run = runner.open_pass(0)
        with PassTraffic() as traffic:
            for _ in run.over(rows.batches([here])):
                pass
    finally:
        runner.close()
    return traffic


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
