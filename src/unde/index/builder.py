"""What `Index.build` and `Index.open` do step by step."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from unde import console, methods
from unde.checkpoints import Checkpoint, fingerprints
from unde.data import Rows, own_collate, to_device
from unde.errors import UndeError, unknown
from unde.fingerprints import Watch, align_rows, changed_example, plain_ids
from unde.gradients.model_state import frozen_eval
from unde.groups import Groups, trainable
from unde.index import defaults
from unde.index import shard_writer as shards
from unde.index.build_settings import settle
from unde.index.build_summary import print_summary
from unde.index.feature_runner import FeatureRunner
from unde.index.reader import Stored
from unde.index.shard_writer import ShardWriter
from unde.index.state import IndexState
from unde.index.validation import (
    changed_task,
    check_shards,
    compare_inputs,
    read_ids,
)
from unde.methods import Method
from unde.pages import kept_pages
from unde.parallel import Executor
from unde.parallel.model_transport import BuildInputs, ModelInputs
from unde.projection import Spec
from unde.setup import Recipe
from unde.store import factored, layout
from unde.store.files import clear_partial
from unde.store.locks import locked
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, exists
from unde.store.shards import ShardError
from unde.tasks.base import Task
from unde.tasks.identity import differences, kind_of

_TRIES = 3  # looks at an index that others change meanwhile


def settled_method(
    method: str | Method, given: BuildInputs, folder: StorePath, exclude: Sequence[str], progress: bool
) -> Method:
    """The method to build for; what it leaves open is settled by task and model, or as it was when the index was begun.

    What was settled here is printed, in one line.
    """
    asked, kind = methods.parse(method), kind_of(given.task.identity())
    before = Manifest.read(folder).method if exists(folder / layout.MANIFEST) else None
    words = []
    if before is None and given.checkpoints is None and isinstance(asked, methods.Damped):
        regularized = _regularized(asked, given, exclude)
        if regularized is not None:
            asked = regularized
            words = [
                f"fisher true and λ = {asked.damping:.3g}, that of the L2 regularization the model is fitted with"
            ]
    chosen = methods.for_building(asked, kind, before, defaults.default_projection(given.model, exclude))
    if asked.projection is None:
        words.insert(0, f"projection {chosen.projection}")
    if isinstance(chosen, methods.Damped) and getattr(asked, "damping", None) == "auto":
        words.append(f"damping {chosen.damping:g} ({chosen.name}, {kind or 'other tasks'})")
    if progress and words:
        console.line(f"settled: {'; '.join(words)}")
    return chosen


def _regularized(asked: methods.Damped, given: BuildInputs, exclude: Sequence[str]) -> methods.Damped | None:
    """With the true Fisher matrix and the λ of a small model at a minimum, where neither was named."""
    if (
        asked.damping != "auto"
        or asked.measure != "loss"
        or getattr(asked, "fisher", "") not in ("auto", "true")
    ):
        return None
    lam = defaults.weight_decay(given.model, given.task, given.rows, exclude)
    if lam is None:
        return None
    changed = {
        "damping": lam / (len(given.rows) if asked.per_example else 1),
        "relative": False,
        "fisher": "true",
    }
    return replace(asked, **changed)


def computed(
    folder: StorePath,
    given: BuildInputs,
    method: Method,
    settling: Callable[[StorePath, BuildInputs, Method], ShardWriter],
    executor: Executor,
    progress: bool,
) -> list[ShardWriter]:
    """The index, and that of other labels where the method has one: settled, and all that is for `executor` to do."""
    homes = [(folder, method)]
    if method.probe is not None:
        homes.append(fisher_home(folder, given, method.probe))  # raises before anything is written
    return computed_in(homes, folder, given, settling, executor, progress)


def fisher_home(folder: StorePath, given: BuildInputs, probe: Method) -> tuple[StorePath, Method]:
    """Where the gradients with other labels go, and how they are measured."""
    assert isinstance(probe, methods.Fisher)
    device = next(given.model.parameters()).device
    with frozen_eval(given.model), torch.no_grad():
        settled = probe.resolve_labels(given.task, given.model, to_device(given.rows.batch([0]), device))
    return folder / layout.FISHERS[settled.kind], settled


def add_fisher(at: IndexState, kind: str, progress: bool) -> None:
    """The gradients with other labels of an index that is there."""
    if kind not in layout.FISHERS:
        raise unknown("fisher", kind, layout.FISHERS)
    folder, m = at.stored.folder, at.stored.manifest
    if at.model is None or at.task is None or at.rows is None:
        raise UndeError(f"{folder} was opened without its model, task and data: open it with all three")
    projected = Spec.parse(str(at.stored.method.projection)).kind == "pca"
    if m.changes is not None or (m.matrices and not projected):
        what = "changed since it was built" if m.changes is not None else "built with second_moments"
        raise UndeError(f"{folder} was {what}: build it anew with fisher={kind!r}")
    given = BuildInputs(at.model, at.task, at.rows, at.checkpoints, at.recipe, at.device)
    probe = methods.Fisher(at.stored.method.projection, m.factors, kind == "true", 0 if kind == "true" else 1)
    options = recorded(m, at.model)
    settling = partial(
        settle, **{name: value for name, value in options.items() if name != "method"}, seen_by=options["method"],
        ids=at.ids, second_moments=None, memory=at.stored.memory, workers=0, each=m.settled.threads,
    )  # fmt: skip
    with on_device(at.model, at.device):
        homes = [fisher_home(folder, given, probe)]
        computed_in(homes, folder, given, settling, at.executor, progress)


@kept_pages()
def computed_in(
    homes: Sequence[tuple[StorePath, Method]],
    folder: StorePath,
    given: BuildInputs,
    settling: Callable[[StorePath, BuildInputs, Method], ShardWriter],
    executor: Executor,
    progress: bool,
) -> list[ShardWriter]:
    """Indexes in `homes`, each measured as its method says."""
    out = []
    for home, measured in homes:
        layout.prepare(home)
        with ExitStack() as held:
            held.enter_context(locked(home, wait=not executor.exclusive))
            clear_partial(home)
            if not executor.in_process:
                given = given.portable(folder / layout.SCRATCH, given.rows)
            writer = settling(home, given, measured)
            if not executor.exclusive:
                held.close()  # others work on the same
            compute(writer, executor, progress)
            out.append(writer)
    return out


def compute(writer: ShardWriter, executor: Executor, progress: bool) -> None:
    """The shards that are missing."""
    jobs = shards.missing(writer, executor)
    if not jobs:
        if executor.exclusive:
            shards.check(writer)
        return
    m = writer.manifest
    count = sum(m.shards[s].stop - m.shards[s].start for _, s in jobs)
    if progress:
        print_summary(writer.runner, count)
    with console.progress("features", count, progress, estimate="examples") as writer.advance:
        shards.compute(writer, jobs, executor)


def opened(writers: list[ShardWriter], memory: int, ids: list[Any] | None, executor: Executor) -> IndexState:
    """What was built, with all that was given for it."""
    folder, at = writers[0].folder, writers[0].inputs
    unfinished = 0 if executor.exclusive else sum(len(shards.unwritten(writer)) for writer in writers)
    return IndexState(
        Stored(folder, Manifest.read(folder), memory),
        ids,
        at.model,
        at.task,
        at.checkpoints,
        at.rows.collate,
        at.rows,
        executor=executor,
        recipe=at.recipe,
        device=at.device,
        unfinished=unfinished,
    )


def check_task(task: Any) -> None:
    if not isinstance(task, Task):
        raise UndeError(
            f"the task is a {type(task).__name__}: expected one of unde.tasks, or a Task of your own"
        )


def check_options(method: Method, on_bad: str, batch_size: int | None, store_dtype: str) -> None:
    if on_bad not in ("error", "skip"):
        raise unknown("on_bad", on_bad, ("error", "skip"))
    if batch_size is not None and batch_size < 1:
        raise UndeError(f"batch_size {batch_size}: expected at least 1")
    factored.check(store_dtype, str(method.projection), auto=True)


def ids_for(rows: Rows, ids: Sequence[Any] | None) -> list[Any] | None:
    found = None if ids is None else plain_ids(ids)
    if found is not None and len(found) != len(rows):
        raise UndeError(f"{len(found)} ids for {len(rows)} examples: expected one for each")
    return found


def found(folder: StorePath, memory: int, verify: bool) -> Stored:
    """What is in a folder, after checking that it is whole; once more if it was changed meanwhile."""
    for left in reversed(range(_TRIES)):
        manifest = Manifest.read(folder)
        try:
            check_shards(folder, manifest, verify)
            break
        except ShardError:
            if not left or Manifest.read(folder).id == manifest.id:
                raise
    return Stored(folder, manifest, memory)


def checked(at: IndexState, train_data: Any, groups: Groups | None) -> IndexState:
    """With its training data and ids, after checking that the index was made from all that is given."""
    folder, manifest = at.stored.folder, at.stored.manifest
    if at.task is not None and at.collate is None:
        at = replace(at, collate=own_collate(at.task.collate, train_data))
    rows = None if train_data is None else Rows(train_data, at.collate)
    models = [] if at.model is None else fingerprints(at.model, at.checkpoints)
    differ = compare_inputs(manifest, at.model, models, groups)
    if rows is not None:
        rows, other = examples_of(at.stored, rows)
        differ += other
    if at.task is not None and not differ:
        differ = task_of(at.stored, at.task, at.model, rows, at.checkpoints)
    if differ:
        raise UndeError(f"{folder} was made from something else. What differs: {'; '.join(differ)}")
    watch = None if at.model is None else Watch(at.model, at.checkpoints)
    return replace(at, ids=read_ids(folder, manifest), rows=rows, watch=watch)


def examples_of(stored: Stored, rows: Rows) -> tuple[Rows, list[str]]:
    """The examples of an index in data that is given for it, and how that differs. Where examples were removed or
    appended since it was built, they are found by their content, in whatever order they are given."""
    m, digests = stored.manifest, stored.values("digest")
    if len(rows) != m.examples:
        differ = f"the length of the training data ({m.examples} there, {len(rows)} given)"
    else:
        changed = changed_example(rows, torch.arange(len(rows)), digests)
        if changed is None:
            return rows, []
        differ = f"the training data (example {changed} has another content)"
    if m.changes is None:
        return rows, [differ]
    those, missing = align_rows(rows, digests)
    if those is None:
        lines = "; ".join(m.changes.lines)
        return rows, [f"{differ}; {missing} of its examples are not in what is given ({lines})"]
    return those, []


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
) -> list[str]:
    """How a task differs from that of an index: in its identity, and with model and data in its features."""
    if model is None or rows is None:
        return differences(stored.manifest.task, task.identity())
    runner = FeatureRunner(stored.folder, stored.manifest, ModelInputs(model, task, rows, checkpoints))
    return changed_task(runner, rows)


def plainly(device: str | torch.device | None) -> str | None:
    return None if device is None else str(device)


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
