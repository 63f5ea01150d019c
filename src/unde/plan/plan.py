"""The plan of a run: what it will need, for a model that may be no more than a config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unde import methods
from unde.data import parse_bytes
from unde.errors import UndeError
from unde.gradients import Coverage
from unde.groups import Groups, trainable
from unde.index.build_settings import rounding_decides, stored_in
from unde.index.defaults import default_projection
from unde.methods import Method
from unde.plan import stages
from unde.plan.numbers import Group, Plan
from unde.plan.passes import measure
from unde.plan.shapes import batches_like, tokens
from unde.plan.stages import Run
from unde.plan.workers import Rates, Workers, rates_of
from unde.store import factored
from unde.tasks.base import Task
from unde.tasks.identity import kind_of


def plan(
    model: nn.Module,
    task: Task,
    example: Any = None,
    *,
    n_examples: int,
    seq_len: int | None = None,
    method: str | Method = "trak",
    groups: Groups | str | Mapping[str, str] = "layer",
    batch_size: int | None = None,
    checkpoints: int = 1,
    exclude: Sequence[str] = (),
    store_dtype: str = "auto",
    queries: int = 100,
    memory: int | str = "2GB",
    workers: int | None = None,
    flops: float | str | None = None,
    cpu_flops: float | str | None = None,
    disk: int | str | None = None,
) -> Plan:
    """What `Index.build` and all that follows will need, without a single number of the model.

    The model may be on the meta device. `example` is a batch as the task gets it, of any number of examples,
    whose tensors may be on the meta device too; for language models `seq_len` will do. Where examples differ in
    length, give the longest. All other arguments are those of `Index.build`, but for the number of `checkpoints`,
    and of `queries` to score and learn weights on. How many examples go through the model at a time follows from
    `memory`, as in a build; a `batch_size` is understood and not needed.

    With `workers` the plan also says what each of so many does and what waits for one process. Hours are counted from
    what a worker does in a second: `flops` operations of the model's passes ("200T"), `cpu_flops` of kernels, which run
    on its processor (measured on this machine unless given), `disk` bytes read or written ("1GB").
    """
    chosen, budget = (
        methods.for_building(method, kind_of(task.identity()), projection=default_projection(model, exclude)),
        parse_bytes(memory),
    )
    counts = {
        "n_examples": n_examples,
        "batch_size": batch_size,
        "checkpoints": checkpoints,
        "queries": queries,
        "workers": workers,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UndeError(f"{name} {value}: expected at least 1")
    if chosen.steps > 1 and checkpoints > 1:
        raise UndeError(f"{chosen} sums over steps of trajectories: it takes one checkpoint")
    rates = _rates(workers, flops, cpu_flops, disk)
    factored.check(store_dtype, str(chosen.projection), auto=True)
    names, partition = trainable(model, exclude), Groups.parse(groups, model, exclude)
    partition.of(names)
    batches = batches_like(_example(model, example, seq_len))
    passes = measure(model, task, batches, names, chosen, n_examples, budget)
    width = sum(u.stop - u.start for u in passes.own.units)
    if store_dtype == factored.AUTO:
        exact = rounding_decides(chosen, n_examples, width)
        store_dtype = stored_in(n_examples, width * checkpoints * chosen.steps, exact)
    run = Run(task, chosen, partition, passes, n_examples, store_dtype, checkpoints, queries, budget)
    return Plan(
        model=type(model).__name__,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        method=chosen.describe(),
        examples=n_examples,
        pass_size=passes.own.size,
        checkpoints=checkpoints,
        steps=chosen.steps,
        queries=queries,
        store_dtype=store_dtype,
        groups=_groups(run),
        ways=_ways(passes.own.coverage),
        flops=stages.flops(run),
        disk=stages.disk(run),
        scratch=run.costs.scratch,
        memory=stages.memory(run),
        notes=_notes(run),
        workers=None if workers is None or rates is None else _divided(run, workers, rates),
    )


def _rates(
    workers: int | None, flops: float | str | None, cpu_flops: float | str | None, disk: int | str | None
) -> Rates | None:
    given = {"flops": flops, "cpu_flops": cpu_flops, "disk": disk}
    alone = [name for name, value in given.items() if value is not None]
    if workers is None and alone:
        raise UndeError(f"{alone[0]} is a rate of one worker: say how many there are, workers=1 for one")
    if workers is None:
        return None
    return rates_of(flops, cpu_flops, None if disk is None else parse_bytes(disk))


def _divided(run: Run, workers: int, rates: Rates) -> Workers:
    merged = run.costs.disk.get("moments of the kernel", 0)
    return Workers(workers, rates, tuple(stages.work(run)), tuple(stages.rounds(run)), merged)


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


def _groups(run: Run) -> dict[str, Group]:
    units = run.passes.own.units
    sizes = {name: Counter[str]() for name in run.groups.names}
    for unit, j in zip(units, run.groups.of([u.name for u in units])):
        sizes[run.groups.names[j]]["parameters"] += torch.Size(unit.shape).numel()
        sizes[run.groups.names[j]]["features"] += unit.stop - unit.start
    return {name: Group(**count) for name, count in sizes.items()}


def _ways(c: Coverage) -> dict[str, int]:
    hooked = {u.name for use in c.uses for u in use.units.values()}
    ways = {
        "layer rules": len(hooked),
        "one copy for each example": len(c.expanded),
        "torch.func.vmap": len(c.vmapped),
        "one backward pass for each example": len(c.looped),
        "no gradient": len(c.unused),
    }
    return {way: count for way, count in ways.items() if count}


def _notes(run: Run) -> tuple[str, ...]:
    notes, refused = [], run.refused()
    if refused is not None:
        notes.append(f"the kernel would stop with an error: {refused}")
    if run.passes.own.coverage.looped:
        notes.append("parameters that need one backward pass for each example make the pass slow")
    return tuple(notes)
