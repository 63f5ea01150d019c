"""What `Index.build` and `Index.open` do step by step."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unde import console, methods, plan
from unde.build import shards
from unde.build.carried import carried
from unde.build.checkpoints import Checkpoint
from unde.build.compare import task_differences
from unde.build.context import Context, Given
from unde.build.probe import changed_task, note_accepted
from unde.build.stored import Stored
from unde.data import Rows
from unde.errors import UndeError
from unde.execution import Executor
from unde.groups import trainable
from unde.methods import Method
from unde.recipe import Recipe
from unde.store import layout
from unde.store.files import clear_partial
from unde.store.locks import locked
from unde.store.manifest import Manifest
from unde.store.remote import Place
from unde.tasks.base import Task
from unde.tasks.identity import same_but_code


def computed(
    folder: Place,
    given: Given,
    method: Method,
    settling: Callable[[Place, Given, Method], Context],
    executor: Executor,
    progress: bool,
) -> list[Context]:
    """The index, and that of sampled labels where the method has one: settled, and all that is for `executor` to do."""
    out = []
    for home, measured in ((folder, method), (folder / layout.FISHER, method.probe)):
        if measured is None:
            continue
        layout.prepare(home)
        with ExitStack() as held:
            held.enter_context(locked(home, wait=not executor.alone))
            clear_partial(home)
            if not executor.here and given.recipe is None:
                sent = carried(
                    given.model, given.task, given.rows.data, given.rows.collate, folder / layout.SCRATCH
                )
                given = replace(given, recipe=sent)
            context = settling(home, given, measured)
            if not executor.alone:
                held.close()  # others work on the same
            _compute(context, executor, progress)
            out.append(context)
    return out


def _compute(context: Context, executor: Executor, progress: bool) -> None:
    """The shards that are missing."""
    jobs = shards.missing(context, executor)
    if not jobs:
        if executor.alone:
            shards.check(context)
        return
    m = context.manifest
    count = sum(m.shards[s].stop - m.shards[s].start for _, s in jobs)
    if progress:
        plan.show_build(context, count)
    with console.progress("features", count, progress, estimate="examples") as context.advance:
        shards.compute(context, jobs, executor)


def recorded(m: Manifest, model: nn.Module) -> dict[str, Any]:
    """The options of `Index.build` that an index was begun with."""
    left_out = set(trainable(model)) - set(m.unit_names)
    return {
        "method": methods.parse(m.method),
        "groups": m.as_groups(),
        "exclude": [f"^{re.escape(name)}$" for name in sorted(left_out)],
        "store_dtype": m.store_dtype,
        "seed": m.seed,
        "on_bad": m.on_bad,
        "checkpoint_weights": m.checkpoint_weights,
    }


def task_of(
    stored: Stored,
    task: Task,
    model: nn.Module | None,
    rows: Rows | None,
    checkpoints: Sequence[Checkpoint] | None,
    accept_code: bool,
) -> tuple[list[str], dict[str, Any]]:
    """How a task differs from that of an index, and what to note about it; other code may be accepted."""
    there, given = stored.manifest.task, task.identity()
    differ = task_differences(there, given, task)
    if not differ or not same_but_code(there, given):
        return differ, {}
    if accept_code:
        note_accepted(stored.folder, given)
        return [], {"accepted_code": given.get("code")}
    if model is None or rows is None:
        return [
            f"{d}; pass model and train_data to see whether it matters, or accept_code=True" for d in differ
        ], {}
    context = Context(stored.folder, stored.manifest, Given(model, task, rows, checkpoints))
    return changed_task(context, given), {}


def as_recipe(recipe: str | Recipe | None) -> Recipe | None:
    return Recipe(recipe) if isinstance(recipe, str) else recipe


@contextmanager
def on_device(model: nn.Module, device: str | torch.device | None) -> Generator[None]:
    """The model on `device` inside the block, and back where it was after it."""
    if device is None:
        yield
        return
    home = next(model.parameters()).device
    try:
        try:
            model.to(device)
        except (RuntimeError, AssertionError) as e:
            raise UndeError(f"cannot use the device {str(device)!r} ({str(e).splitlines()[0]})") from None
        yield
    finally:
        model.to(home)
