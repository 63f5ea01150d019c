"""The steps of `Index.build`: resolve the method, begin or resume the index, compute its missing shards."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unde import console, methods
from unde.data import Rows, to_device
from unde.errors import UndeError, unknown
from unde.fingerprints import plain_ids
from unde.gradients.model_state import frozen_eval
from unde.groups import trainable
from unde.index import defaults
from unde.index import shard_writer as shards
from unde.index.build_settings import BuildSettings, begin_index
from unde.index.build_summary import print_summary
from unde.index.reader import IndexReader
from unde.index.shard_writer import ShardWriter
from unde.index.state import IndexState
from unde.methods import Method
from unde.parallel import Executor
from unde.parallel.model_transport import BuildInputs
from unde.projection import Spec
from unde.store import layout
from unde.store.files import clear_partial
from unde.store.locks import locked
from unde.store.manifest import Manifest
from unde.store.remote import StorePath, exists
from unde.tasks.base import kind_of


def resolve_method(
    method: str | Method, inputs: BuildInputs, folder: StorePath, exclude: Sequence[str], progress: bool
) -> Method:
    """The method with projection and damping resolved, by task and model or as an index in the folder has them.

    What was resolved is printed in one line.
    """
    wanted, kind = methods.parse(method), kind_of(inputs.task.identity())
    before = Manifest.read(folder).method if exists(folder / layout.MANIFEST) else None
    words = []
    if before is None and inputs.checkpoints is None and isinstance(wanted, methods.Damped):
        regularized = _with_regularization(wanted, inputs, exclude)
        if regularized is not None:
            wanted = regularized
            words = [
                f"fisher true and λ = {wanted.damping:.3g}, that of the L2 regularization the model is fitted with"
            ]
    resolved = methods.for_building(wanted, kind, before, defaults.default_projection(inputs.model, exclude))
    if wanted.projection is None:
        words.insert(0, f"projection {resolved.projection}")
    if isinstance(resolved, methods.Damped) and getattr(wanted, "damping", None) == "auto":
        words.append(f"damping {resolved.damping:g} ({resolved.name}, {kind or 'other tasks'})")
    if progress and words:
        console.line(f"settled: {'; '.join(words)}")
    return resolved


def _with_regularization(
    method: methods.Damped, inputs: BuildInputs, exclude: Sequence[str]
) -> methods.Damped | None:
    """The true Fisher matrix and the λ of a small model at its minimum, if the method leaves both open."""
    is_open = method.damping == "auto" and getattr(method, "fisher", "") in ("auto", "true")
    if not is_open or method.measure != "loss":
        return None
    decay = defaults.weight_decay(inputs.model, inputs.task, inputs.rows, exclude)
    if decay is None:
        return None
    damping = decay / (len(inputs.rows) if method.per_example else 1)
    return replace(method, damping=damping, relative=False, fisher="true")


def build(
    folder: StorePath,
    inputs: BuildInputs,
    method: Method,
    settings: BuildSettings,
    executor: Executor,
    progress: bool,
) -> IndexState:
    """Build the index, and the gradients with other labels if the method needs them."""
    homes = [(folder, method)]
    if method.probe is not None:
        homes.append(_fisher_home(folder, inputs, method.probe))  # raises before anything is written
    writers = _build_homes(homes, folder, inputs, settings, executor, progress)
    unfinished = 0 if executor.exclusive else sum(len(shards.list_unwritten(writer)) for writer in writers)
    inputs = writers[0].inputs
    return IndexState(
        IndexReader(folder, Manifest.read(folder), settings.memory),
        settings.ids,
        inputs.model,
        inputs.task,
        inputs.checkpoints,
        inputs.rows.collate,
        inputs.rows,
        executor=executor,
        recipe=inputs.recipe,
        device=inputs.device,
        unfinished=unfinished,
    )


def _fisher_home(folder: StorePath, inputs: BuildInputs, probe: Method) -> tuple[StorePath, Method]:
    """The folder of the gradients with other labels, and the method that measures them."""
    assert isinstance(probe, methods.Fisher)
    device = next(inputs.model.parameters()).device
    with frozen_eval(inputs.model), torch.no_grad():
        fisher = probe.resolve_labels(inputs.task, inputs.model, to_device(inputs.rows.batch([0]), device))
    return folder / layout.FISHERS[fisher.kind], fisher


def add_fisher(state: IndexState, kind: str, progress: bool) -> None:
    """Compute the gradients with other labels of an existing index."""
    if kind not in layout.FISHERS:
        raise unknown("fisher", kind, layout.FISHERS)
    folder, m = state.stored.folder, state.stored.manifest
    if state.model is None or state.task is None or state.rows is None:
        raise UndeError(f"{folder} was opened without its model, task and data: open it with all three")
    is_pca = Spec.parse(str(state.stored.method.projection)).kind == "pca"
    if m.changes is not None or (m.matrices and not is_pca):
        what = "changed since it was built" if m.changes is not None else "built with second_moments"
        raise UndeError(f"{folder} was {what}: build it anew with fisher={kind!r}")
    inputs = BuildInputs(state.model, state.task, state.rows, state.checkpoints, state.recipe, state.device)
    options = recorded_options(m, state.model)
    method = options.pop("method")
    settings = BuildSettings(
        **options, scoring_method=method, ids=state.ids, memory=state.stored.memory, threads=m.settled.threads
    )
    probe = methods.Fisher(method.projection, m.factors, kind == "true", 0 if kind == "true" else 1)
    with on_device(state.model, state.device):
        homes = [_fisher_home(folder, inputs, probe)]
        _build_homes(homes, folder, inputs, settings, state.executor, progress)


def _build_homes(
    homes: Sequence[tuple[StorePath, Method]],
    folder: StorePath,
    inputs: BuildInputs,
    settings: BuildSettings,
    executor: Executor,
    progress: bool,
) -> list[ShardWriter]:
    """Build an index in each folder by its method."""
    writers = []
    for home, method in homes:
        layout.prepare(home)
        with ExitStack() as lock:
            lock.enter_context(locked(home, wait=not executor.exclusive))
            clear_partial(home)
            if not executor.in_process:
                inputs = inputs.portable(folder / layout.SCRATCH, inputs.rows)
            writer = begin_index(home, inputs, method, settings, executor)
            if not executor.exclusive:
                lock.close()  # other workers compute shards of the same index
            compute_missing(writer, executor, progress)
            writers.append(writer)
    return writers


def compute_missing(writer: ShardWriter, executor: Executor, progress: bool) -> None:
    """Compute the missing shards of an index."""
    jobs = shards.list_missing(writer, executor)
    if not jobs:
        if executor.exclusive:
            shards.check_data_unchanged(writer)
        return
    m = writer.manifest
    count = sum(m.shards[s].stop - m.shards[s].start for _, s in jobs)
    if progress:
        print_summary(writer.runner, count)
    with console.progress("features", count, progress, estimate="examples") as writer.advance:
        shards.compute_shards(writer, jobs, executor)


def parse_ids(rows: Rows, ids: Sequence[Any] | None) -> list[Any] | None:
    """The ids as plain values; raises unless there is one for each example."""
    if ids is None:
        return None
    values = plain_ids(ids)
    if len(values) != len(rows):
        raise UndeError(f"{len(values)} ids for {len(rows)} examples: expected one for each")
    return values


def recorded_options(m: Manifest, model: nn.Module) -> dict[str, Any]:
    """The options of `Index.build` that an index was begun with."""
    excluded = set(trainable(model)) - set(m.unit_names)
    return {
        "method": methods.parse(m.method),
        "groups": m.as_groups(),
        "exclude": [f"^{re.escape(name)}$" for name in sorted(excluded)],
        "store_dtype": m.store_dtype,
        "seed": m.seed,
        "on_bad": m.on_bad,
        "checkpoint_weights": m.checkpoint_weights,
    }


@contextmanager
def on_device(model: nn.Module, device: str | torch.device | None) -> Generator[None]:
    """Move the model to `device` inside the block, and back after it."""
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
