"""The plan of a run: what it will need, for a model that may be no more than a config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from unde import methods
from unde.console import size
from unde.data import parse_bytes
from unde.errors import UndeError
from unde.features.directions import SAMPLE
from unde.groups import Groups, trainable
from unde.methods import Method
from unde.plan import stages
from unde.plan.passes import Measured, measure
from unde.plan.shapes import batches_like, tokens
from unde.plan.stages import Bytes, Run
from unde.store.codec import codec
from unde.tasks.base import Task


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
    batch_size: int
    checkpoints: int
    queries: int
    store_dtype: str
    groups: dict[str, Group]
    ways: dict[str, int]  # how many parameters go which way
    flops: dict[str, int]  # by pass
    disk: Bytes  # by kind of file
    memory: dict[str, Bytes]  # by stage, then by what takes it
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
        return asdict(self) | {"totals": totals, "notes": list(self.notes)}

    def __str__(self) -> str:
        from unde.plan.show import table

        return table(self)


def plan(
    model: nn.Module,
    task: Task,
    example: Any = None,
    *,
    n_examples: int,
    seq_len: int | None = None,
    method: str | Method = "trak",
    groups: Groups | str | Mapping[str, str] = "layer",
    exclude: Sequence[str] = (),
    batch_size: int = 32,
    store_dtype: str = "float32",
    checkpoints: int = 1,
    queries: int = 100,
    memory: int | str = "2GB",
) -> Plan:
    """What `Index.build` and all that follows will need, without a single number of the model.

    The model may be on the meta device. `example` is a batch as the task gets it, of any number of examples,
    whose tensors may be on the meta device too; for language models `seq_len` will do. All other arguments are
    those of `Index.build`, but for the number of `checkpoints`, and of `queries` to score and learn weights on.
    """
    method, budget = methods.for_building(method), parse_bytes(memory)
    counts = {"n_examples": n_examples, "batch_size": batch_size, "checkpoints": checkpoints}
    for name, value in (counts | {"queries": queries}).items():
        if value < 1:
            raise UndeError(f"{name} {value}: expected at least 1")
    codec(store_dtype)
    names, partition = trainable(model, exclude), Groups.parse(groups, model, exclude)
    of = partition.of(names)
    batch_size = min(batch_size, n_examples)
    batches = batches_like(_example(model, example, seq_len))
    found = measure(model, task, batches, names, method, batch_size, budget)
    run = Run(
        method=method,
        units=found.units,
        groups=partition,
        examples=n_examples,
        batch_size=batch_size,
        store_dtype=store_dtype,
        checkpoints=checkpoints,
        queries=queries,
        memory=budget,
        given=found.given,
    )
    sizes = {name: Counter[str]() for name in partition.names}
    for unit, j in zip(found.units, of):
        sizes[partition.names[j]]["parameters"] += torch.Size(unit.shape).numel()
        sizes[partition.names[j]]["features"] += unit.stop - unit.start
    return Plan(
        model=type(model).__name__,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        method=method.describe(),
        examples=n_examples,
        batch_size=batch_size,
        checkpoints=checkpoints,
        queries=queries,
        store_dtype=store_dtype,
        groups={name: Group(**count) for name, count in sizes.items()},
        ways=_ways(found),
        flops=_flops(run, found),
        disk=stages.disk(run),
        memory=_memory(run, found),
        notes=_notes(run, found),
    )


def _example(model: nn.Module, example: Any, seq_len: int | None) -> Any:
    if (example is None) == (seq_len is None):
        raise UndeError(
            "expected one of two things to plan with: an example batch as the task gets it (on any device, also "
            "meta), or for language models seq_len=, the tokens of an example"
        )
    if seq_len is None:
        return example
    if seq_len < 2:
        raise UndeError(f"seq_len {seq_len}: expected at least 2 tokens, one to predict the other from")
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and seq_len > longest:
        raise UndeError(
            f"seq_len {seq_len}: the model reads {longest} tokens at most (max_position_embeddings of its config)"
        )
    return tokens(model, seq_len)


def _ways(found: Measured) -> dict[str, int]:
    c = found.coverage
    hooked = {u.name for use in c.uses for u in use.units.values()}
    ways = {
        "layer rules": len(hooked),
        "one copy for each example": len(c.expanded),
        "torch.func.vmap": len(c.vmapped),
        "one backward pass for each example": len(c.looped),
        "no gradient": len(c.unused),
    }
    return {way: count for way, count in ways.items() if count}


def _flops(run: Run, found: Measured) -> dict[str, int]:
    whole = run.examples * run.checkpoints

    def all_of(flops: int) -> int:
        return round(flops * whole / run.batch_size)

    sampled = run.method.probe is not None
    flops = {
        "training": round(found.plain.flops * run.examples / run.batch_size),
        "frozen": all_of(found.frozen.flops),
        "features": all_of(found.features.flops) * (2 if sampled else 1),
    }
    if found.directions is not None:
        flops["directions"] = round(found.directions.flops * min(SAMPLE, run.examples) / run.batch_size)
    if stages.settled(run).rounds:
        flops["kernel"] = stages.kernel(run)[1]
    return flops


def _memory(run: Run, found: Measured) -> dict[str, Bytes]:
    weights, base = found.weights, found.weights + found.projection
    copies = {"the model's own weights": weights} if run.checkpoints > 1 else {}
    model = {"weights": weights, "projection": found.projection} | copies
    stage = {
        "training with Adam": {
            "weights": weights,
            "moments": 2 * found.trained,
            "pass": found.plain.peak - weights,
        },
        "check": model | {"pass": found.checking.peak - base},
        "features": model
        | {"pass": found.features.peak - base, "shards being written": stages.shard_buffers(run)},
    }
    if found.directions is not None:
        stage["directions"] = model | {"pass": found.directions.peak - base}
    if stages.settled(run).rounds:
        stage["kernel"] = stages.kernel(run)[0]
    return stage | {"scoring": stages.scoring(run), "weight learning": stages.learning(run)}


def _notes(run: Run, found: Measured) -> tuple[str, ...]:
    notes, needs = [], stages.settled(run).needs().matrices
    if needs > run.memory:
        notes.append(
            f"the kernel needs {size(needs)}, more than memory={size(run.memory)}: it would stop with an error. "
            f"Give the index memory='{-(-needs // 10**9)}GB', or take a smaller projection"
        )
    if found.coverage.looped:
        notes.append("parameters that need one backward pass for each example make the pass slow")
    return tuple(notes)
