"""Build an index: resolve the method and settings, begin or resume the index, compute its missing shards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unde import methods
from unde.checkpoints import resolve_checkpoint_weights
from unde.devices import budget, device_of, model_bytes, name_memory
from unde.errors import OtherIndex, UndeError, unknown
from unde.fingerprints import ids_fingerprint
from unde.gradients import Unit, adam_preconditioner, describe_units, make_units
from unde.gradients.feature_pass import torch_threads
from unde.groups import Groups, trainable
from unde.index import shard_writer as shards
from unde.index.feature_runner import FeatureRunner, raise_failing_sample
from unde.index.projection_matrices import resolve, resolve_labels, with_ranks
from unde.index.reader import IndexReader, write_ids
from unde.index.shard_writer import ShardWriter
from unde.index.sizes import choose_shard_size, choose_store_dtype, draft_manifest
from unde.index.state import (
    IndexState,
    compare_task,
    list_differences,
    note_device,
    probe_path,
    write_probe,
)
from unde.methods import Method
from unde.parallel import SERIAL, Executor
from unde.parallel.model_transport import BuildInputs, ModelInputs
from unde.projection import WHOLE, Spec
from unde.store import factored, layout
from unde.store.factored import AUTO
from unde.store.files import clear_partial
from unde.store.locks import locked
from unde.store.manifest import Manifest, ResolvedSettings
from unde.store.remote import StorePath, exists
from unde.store.shards import is_valid_shard
from unde.store.sync import delete_index


@dataclass(frozen=True)
class BuildSettings:
    """The options of a build, but for the method; `scoring_method` is the one that stored features must suffice for."""

    scoring_method: Method
    memory: int
    device_memory: int | None = None  # that the user gave
    groups: Groups | str | Mapping[str, str] = "layer"
    exclude: Sequence[str] = ()
    store_dtype: str = AUTO
    seed: int = 0
    on_bad: str = "error"
    checkpoint_weights: Sequence[float] | None = None
    ids: Sequence[Any] | None = None
    threads: int | None = None  # of each job; None: as many as this process has
    second_moments: Any = None
    batch_size: int | None = None
    workers: int = 0  # processes that read the data
    overwrite: bool = False
    per_checkpoint: bool = True  # random projections, in a new index

    def pass_memory(self, inputs: ModelInputs, executor: Executor) -> int:
        """Bytes that a pass may take where the model is; workers on one device share it, each with its own model."""
        device = device_of(inputs.model)
        named = inputs.device is not None and torch.device(inputs.device).index is not None
        workers = executor.sharing(device, named)
        copies = 0 if executor.in_process else workers * model_bytes(inputs.model)
        return budget(device, self.memory, self.device_memory, workers, copies).memory

    def check(self, inputs: BuildInputs, method: Method) -> tuple[list[str], Groups, dict[str, Tensor]]:
        """The parameters, their groups and scales; raises for wrong settings before anything is written."""
        if self.on_bad not in ("error", "skip"):
            raise unknown("on_bad", self.on_bad, ("error", "skip"))
        if self.batch_size is not None and self.batch_size < 1:
            raise UndeError(f"batch_size {self.batch_size}: expected at least 1")
        if self.workers < 0:
            raise UndeError(f"num_workers is {self.workers}: expected 0, or how many processes read the data")
        factored.check(self.store_dtype, str(method.projection))
        if method.steps > 1 and inputs.checkpoints is not None:
            raise UndeError(f"{method} sums over steps of trajectories: it takes one checkpoint")
        names = trainable(inputs.model, self.exclude)
        partition = Groups.parse(self.groups, inputs.model, self.exclude)
        partition.of(names)
        _ = inputs.models, inputs.data  # raises unless two readings agree
        if self.second_moments is None:
            return names, partition, {}
        if method.factors or method.whitened:
            raise UndeError(
                "EKFAC needs the two sides of a gradient apart, but second_moments weighs its entries one by one: "
                "use one of the two"
            )
        return names, partition, adam_preconditioner.scales(self.second_moments, inputs.model, names)


def begin_index(
    folder: StorePath,
    inputs: BuildInputs,
    method: Method,
    settings: BuildSettings,
    executor: Executor = SERIAL,
) -> ShardWriter:
    """Begin an index, or resume the one in the folder; with `overwrite` another one is replaced.

    Everything that the bytes of an index depend on is decided here and recorded before the first shard.
    """
    with name_memory(device_of(inputs.model)):
        start = _Start(folder, inputs, method, settings, settings.pass_memory(inputs, executor))
        try:
            return start.writer()
        except OtherIndex:
            if not settings.overwrite:
                raise
        return start.writer(replacing=True)


@dataclass(frozen=True)
class _Start:
    """The start of a build in a folder."""

    folder: StorePath
    inputs: BuildInputs
    method: Method
    settings: BuildSettings
    memory: int  # bytes that a pass may take

    def writer(self, replacing: bool = False) -> ShardWriter:
        """Begin the index, in place of the one in the folder if `replacing`, or resume that."""
        folder, inputs, method, settings = self.folder, self.inputs, self.method, self.settings
        names, partition, scales = settings.check(inputs, method)
        there = (folder / layout.MANIFEST).exists() and not replacing
        existing = Manifest.read(folder) if there else None
        kind, spec = device_of(inputs.model).type, Spec.parse(str(method.projection))
        drawn = settings.per_checkpoint and len(inputs.models) > 1 and spec.kind not in WHOLE
        device, threads = None if kind == "cpu" else kind, settings.threads or torch.get_num_threads()
        new = ResolvedSettings(0, 0, threads, device=device, per_checkpoint=drawn)
        wanted = draft_manifest(
            method,
            inputs.task,
            len(inputs.rows),
            partition,
            store_dtype=factored.resolve(settings.store_dtype, str(method.projection)),
            seed=settings.seed,
            on_bad=settings.on_bad,
            models=inputs.models,
            checkpoint_weights=resolve_checkpoint_weights(
                settings.checkpoint_weights, len(inputs.models), method.terms
            ),
            data=inputs.data,
            ids=ids_fingerprint(settings.ids),
            resolved=new if existing is None else existing.resolved,
        )
        if existing is not None and settings.overwrite:  # before matrices are computed
            later = {name: getattr(existing, name) for name in ("units", "matrices", "store_dtype")}
            self._refuse(list_differences(existing, replace(wanted, **later)))
        with torch_threads(wanted.resolved.threads), raise_failing_sample(inputs, settings.ids):
            matrices: dict[str, Tensor] = {}
            if scales or method.whitened or (existing is not None and existing.matrices):
                wanted, matrices = resolve(folder, inputs, names, scales, self.memory, wanted, existing)
            units = make_units(inputs.model, names, str(method.projection), settings.seed, matrices)
            wanted = replace(
                wanted, units=with_ranks(describe_units(units), str(method.projection), matrices)
            )
            if wanted.store_dtype == AUTO:
                sizes = wanted.examples, wanted.width, wanted.terms
                usual = choose_store_dtype(settings.scoring_method, *sizes)
                wanted = replace(wanted, store_dtype=usual if existing is None else existing.store_dtype)
            if existing is None:
                return self._begin(wanted, units, replacing)
            return self._resume(wanted, existing)

    def _begin(self, wanted: Manifest, units: list[Unit], replacing: bool) -> ShardWriter:
        """Decide coverage, pass and shard sizes of a new index; write its manifest. An index in its place goes last.

        In an object store another process may begin the same index meanwhile: the first manifest counts.
        """
        folder, inputs, settings = self.folder, self.inputs, self.settings
        draft = FeatureRunner(folder, wanted, inputs)
        draft.units = units
        manifest = draft.choose_passes(inputs.rows, self.memory, settings.batch_size)
        size = choose_shard_size(manifest, settings.memory)
        manifest = replace(manifest, resolved=replace(manifest.resolved, shard_size=size))
        writer = ShardWriter(folder, manifest, inputs, settings.workers, settings.ids)
        writer.runner.units = units
        if replacing:
            delete_index(folder, keep=[layout.MATRICES] if wanted.matrices else [])
        (folder / layout.SHARDS).mkdir(exist_ok=True)
        write_probe(writer.runner, inputs.rows)
        write_ids(folder, settings.ids)
        existing = manifest.begin(folder)
        if existing.id == manifest.id:
            return writer
        with torch_threads(existing.resolved.threads):
            return self._resume(wanted, existing)

    def _resume(self, wanted: Manifest, existing: Manifest) -> ShardWriter:
        """Go on with an index in the folder; raises if it is not the wanted one."""
        folder, inputs, settings = self.folder, self.inputs, self.settings
        writer = ShardWriter(folder, existing, inputs, settings.workers, settings.ids)
        note_device(folder, existing, inputs.model)
        differ = list_differences(existing, wanted)
        self._refuse(differ or compare_task(writer.runner, inputs.rows))
        (folder / layout.SHARDS).mkdir(exist_ok=True)
        if not is_valid_shard(probe_path(folder, existing), existing.id):
            write_probe(writer.runner, inputs.rows)
        write_ids(folder, settings.ids, existing.generation)
        return writer

    def _refuse(self, differ: list[str]) -> None:
        if differ:
            raise OtherIndex(
                f"{self.folder} already holds another index. What differs: {'; '.join(differ)}. Choose another "
                "folder, or replace that index: overwrite=True, --overwrite on the command line"
            )


def build(
    folder: StorePath,
    inputs: BuildInputs,
    method: Method,
    settings: BuildSettings,
    executor: Executor,
    progress: bool,
) -> IndexState:
    """Build the index, and the gradients with other labels if the method needs them."""
    parts = [method]
    if isinstance(method.probe, methods.Fisher):  # raises before anything is written
        parts.append(resolve_labels(method.probe, inputs.model, inputs.task, inputs.rows))
    writers = _build_parts(parts, folder, inputs, settings, executor, progress)
    paths = [] if executor.exclusive else [p for w in writers for p in w.reader.paths.values()]
    unfinished = sum(not exists(path) for path in paths)
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
        device_memory=settings.device_memory,
        unfinished=unfinished,
    )


def add_fisher(state: IndexState, kind: str, progress: bool) -> None:
    """Compute the gradients with other labels of an existing index."""
    if kind not in layout.FISHERS:
        raise unknown("fisher", kind, layout.FISHERS)
    folder, m = state.stored.folder, state.stored.manifest
    inputs = state.build_inputs("gradients with other labels are computed by the model")
    if m.changes is not None or m.matrices:
        kept = "with whitened gradients" if state.stored.method.whitened else "with second_moments"
        what = "changed since it was built" if m.changes is not None else f"built {kept}"
        raise UndeError(f"{folder} was {what}: build it anew with fisher={kind!r}")
    options = recorded_options(m, inputs.model)
    method = options.pop("method")
    settings = BuildSettings(
        **options,
        scoring_method=method,
        ids=state.ids,
        memory=state.stored.memory,
        device_memory=state.device_memory,
        threads=m.resolved.threads,
    )
    probe = methods.Fisher(method.projection, m.factors, kind == "true", 0 if kind == "true" else 1)
    parts = [resolve_labels(probe, inputs.model, inputs.task, inputs.rows)]
    _build_parts(parts, folder, inputs, settings, state.executor, progress)


def _build_parts(
    parts: Sequence[Method],
    folder: StorePath,
    inputs: BuildInputs,
    settings: BuildSettings,
    executor: Executor,
    progress: bool,
) -> list[ShardWriter]:
    """Build the index by its method, and gradients with other labels in folders inside it."""
    writers = []
    for method in parts:
        home = folder / layout.FISHERS[method.kind] if isinstance(method, methods.Fisher) else folder
        layout.prepare(home)
        if home != folder:  # the kernel of one is applied to features of the other
            settings = replace(settings, per_checkpoint=Manifest.read(folder).resolved.per_checkpoint)
        with ExitStack() as lock:
            lock.enter_context(locked(home, wait=not executor.exclusive))
            clear_partial(home)
            if not executor.in_process:
                inputs = inputs.portable(folder / layout.SCRATCH, inputs.rows)
            writer = begin_index(home, inputs, method, settings, executor)
            if not executor.exclusive:
                lock.close()  # other workers compute shards of the same index
            shards.compute_missing(writer, executor, progress)
            writers.append(writer)
    return writers


def recorded_method(folder: StorePath) -> dict[str, Any] | None:
    """The method of an index that was begun, if there is one."""
    return Manifest.read(folder).method if exists(folder / layout.MANIFEST) else None


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
