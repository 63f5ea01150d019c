"""The numbers of a plan, and the table that shows them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from unde.console import size
from unde.plan.show import columns, flops
from unde.plan.workers import Workers

_PASSES = {
    "training": "training pass (forward and backward)",
    "frozen": "frozen pass (no weight gradients)",
    "features": "features",
    "sampled labels": "features with sampled labels",
    "directions": "directions of pca, from a sample",
    "kernel": "kernel",
}
_STAGES = {
    "training with Adam": "training step with Adam, to compare",
    "check": "check of a few examples",
    "features": "features",
    "sampled labels": "features with sampled labels",
    "directions": "directions of pca",
    "kernel": "kernel",
    "scoring": "scoring {queries} queries",
    "weight learning": "weight learning on {queries} queries",
}
Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Group:
    """A parameter group: how many parameters it has, and how long its part of a feature is."""

    parameters: int
    features: int


@dataclass(frozen=True)
class Plan:
    """Numbers of a run; `print` shows them as a table.

    Operations (`flops`) are those of the whole run: matrix products, convolutions and attention, a multiplication
    and an addition being two. `disk` and `memory` are in bytes; `memory` has the parts of each stage's peak.
    """

    model: str
    dtype: str  # of its weights
    method: dict[str, Any]
    examples: int
    pass_size: int  # examples that go through the model together, as a build settles it
    checkpoints: int
    steps: int  # of a trajectory whose features are kept apart, 1 for none
    queries: int
    store_dtype: str
    groups: dict[str, Group]
    ways: dict[str, int]  # how many parameters go which way
    flops: dict[str, int]  # by pass
    disk: dict[str, int]  # by kind of file
    scratch: int  # bytes on disk that are free again once the kernel is fitted
    memory: dict[str, dict[str, int]]  # by stage, then by what takes it
    notes: tuple[str, ...] = ()
    workers: Workers | None = None  # a build by several, if asked for

    @property
    def parameters(self) -> int:
        return sum(g.parameters for g in self.groups.values())

    @property
    def features(self) -> int:
        return sum(g.features for g in self.groups.values())

    @property
    def bytes_on_disk(self) -> int:
        return sum(self.disk.values())

    def ratio(self, name: str) -> float:
        """The operations of a pass, relative to one training pass over the same examples."""
        return self.flops[name] / self.flops["training"]

    def peak(self, stage: str) -> int:
        """Bytes in memory at once."""
        return sum(self.memory[stage].values())

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and names, sums included."""
        totals = {
            "parameters": self.parameters,
            "features": self.features,
            "bytes_on_disk": self.bytes_on_disk,
            "peak_memory": {stage: self.peak(stage) for stage in self.memory},
            "flops_relative_to_training": {name: self.ratio(name) for name in self.flops},
        }
        workers = {} if self.workers is None else {"workers": self.workers.as_dict()}
        return asdict(self) | {"totals": totals, "notes": list(self.notes)} | workers

    def __str__(self) -> str:
        ways = ", ".join(f"{count} by {way}" for way, count in self.ways.items())
        lines = [
            self._title(),
            "",
            *columns([("groups", "parameters", "features"), *self._group_rows()]),
            f"parameter tensors: {ways}",
            "",
            *columns([("operations", "of training", "in all"), *self._operation_rows()]),
            "",
            *columns([("on disk", "bytes"), *self._disk_rows()]),
            "",
            *columns([("peak memory", "bytes", "of which"), *self._memory_rows()], left=2),
        ]
        lines += ["", str(self.workers)] if self.workers is not None else []
        return "\n".join([*lines, *("\nnote: " + note for note in self.notes)])

    def _title(self) -> str:
        checkpoints = f", {self.checkpoints} checkpoints" if self.checkpoints > 1 else ""
        steps = f", {self.steps} steps" if self.steps > 1 else ""
        together = f"{self.pass_size} example{'s' if self.pass_size > 1 else ''} in a pass"
        return (
            f"{self.model} in {self.dtype}: {self.examples:,} examples, {together}{checkpoints}{steps}; "
            f"{self.method['name']}, {self.method['projection']}, stored in {self.store_dtype}"
        )

    def _group_rows(self) -> Rows:
        """Groups that differ in a number only share a row."""
        rows: dict[str, list[int]] = {}
        for name, group in self.groups.items():
            row = rows.setdefault(re.sub(r"\d+", "*", name), [0, 0, 0])
            for i, value in enumerate((1, group.parameters, group.features)):
                row[i] += value
        shown = [(f"{n} × {name}" if n > 1 else name, f"{p:,}", f"{f:,}") for name, (n, p, f) in rows.items()]
        return [*shown, (f"all {len(self.groups)}", f"{self.parameters:,}", f"{self.features:,}")]

    def _operation_rows(self) -> Rows:
        shares = {name: self.ratio(name) for name in self.flops}
        shown = {name: f"{share:.3f}" if share >= 0.001 else "< 0.001" for name, share in shares.items()}
        return [(_PASSES[name], shown[name], flops(n)) for name, n in self.flops.items()]

    def _disk_rows(self) -> Rows:
        rows: Rows = [*((name, size(n)) for name, n in self.disk.items()), ("all", size(self.bytes_on_disk))]
        return [*rows, ("besides, until the kernel is fitted", size(self.scratch))] if self.scratch else rows

    def _memory_rows(self) -> Rows:
        rows = []
        for stage, parts in self.memory.items():
            peak = self.peak(stage)
            shown = ", ".join(f"{name} {size(n)}" for name, n in parts.items() if n >= 0.01 * peak)
            rows.append((_STAGES[stage].format(queries=self.queries), size(peak), shown))
        return rows
