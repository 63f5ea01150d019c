"""Settings of a build: what the bytes of an index depend on is decided once and recorded in its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unde import projection
from unde.checkpoints import resolve_checkpoint_weights
from unde.data import evenly
from unde.errors import UndeError, unknown
from unde.fingerprints import ids_fingerprint
from unde.gradients import Unit, adam_preconditioner, make_units
from unde.gradients.coverage import EXAMPLES
from unde.gradients.feature_pass import largest, torch_threads
from unde.groups import Groups, trainable
from unde.index import pca
from unde.index.feature_runner import FeatureRunner, describe_units, raise_failing_example
from unde.index.shard_writer import ShardWriter
from unde.index.validation import compare_task, list_differences, probe_path, restore_probe, write_probe
from unde.kernels.precision import could_refuse
from unde.methods import DEFAULT_DAMPING, TRAK, Damped, Method
from unde.parallel import SERIAL, Executor
from unde.parallel.model_transport import BuildInputs
from unde.projection import Spec
from unde.store import factored, layout
from unde.store.codec import Int8
from unde.store.factored import AUTO
from unde.store.files import write_bytes
from unde.store.manifest import SCHEMA, Manifest, ResolvedSettings
from unde.store.remote import StorePath
from unde.store.shards import is_valid_shard

EXACT = 2**28  # bytes up to which "auto" stores float32
SHARD_BYTES = 2**24  # of a shard in float32
SHARD_SHARE = 8  # a shard may take one in so many of the memory budget: it is joined, packed and written
SHARD_PASSES = 64  # at most this much work is lost to a kill
PASSES = "passes"  # among the matrices: examples and rows in the passes that computed them


@dataclass(frozen=True)
class BuildSettings:
    """The options of a build, but for the method; `scoring_method` is the one that stored features must suffice for."""

    scoring_method: Method
    memory: int
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

    def check(self, inputs: BuildInputs, method: Method) -> tuple[list[str], Groups, dict[str, Tensor]]:
        """The parameters, their groups and scales; raises for wrong settings before anything is written."""
        if self.on_bad not in ("error", "skip"):
            raise unknown("on_bad", self.on_bad, ("error", "skip"))
        if self.batch_size is not None and self.batch_size < 1:
            raise UndeError(f"batch_size {self.batch_size}: expected at least 1")
        if self.workers < 0:
            raise UndeError(f"num_workers is {self.workers}: expected 0, or how many processes read the data")
        factored.check(self.store_dtype, str(method.projection), auto=True)
        if method.steps > 1 and inputs.checkpoints is not None:
            raise UndeError(f"{method} sums over steps of trajectories: it takes one checkpoint")
        names = trainable(inputs.model, self.exclude)
        partition = Groups.parse(self.groups, inputs.model, self.exclude)
        partition.of(names)
        _ = inputs.models, inputs.data  # raises unless two readings agree
        if self.second_moments is None:
            return names, partition, {}
        if method.factors:
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
    """Begin an index, or resume the one in the folder; pca directions are computed by `executor`.

    Everything that the bytes of an index depend on is decided here and recorded before the first shard.
    """
    names, partition, scales = settings.check(inputs, method)
    existing = Manifest.read(folder) if (folder / layout.MANIFEST).exists() else None
    new = ResolvedSettings(0, 0, settings.threads or torch.get_num_threads())
    wanted = Manifest(
        schema=SCHEMA,
        projection_version=projection.VERSION,
        method=method.describe(),
        task=inputs.task.identity(),
        examples=len(inputs.rows),
        store_dtype=settings.store_dtype,
        seed=settings.seed,
        on_bad=settings.on_bad,
        units=[],
        groups={k: list(v) for k, v in partition.members.items()},
        models=inputs.models,
        checkpoint_weights=resolve_checkpoint_weights(
            settings.checkpoint_weights, len(inputs.models), method.terms
        ),
        data=inputs.data,
        ids=ids_fingerprint(settings.ids),
        factors=method.factors,
        matrices="",
        settled=new if existing is None else existing.settled,
    )

    def suspects() -> list[int]:
        return sorted({*evenly(len(inputs.rows), EXAMPLES), largest(inputs.rows)})

    with (
        torch_threads(wanted.settled.threads),
        raise_failing_example(inputs.model, inputs.task, inputs.rows, suspects, settings.ids),
    ):
        directions = _Matrices(folder, inputs, method, names, scales, settings.memory, executor)
        wanted, matrices = directions.resolve(wanted, existing)
        units = make_units(inputs.model, names, str(method.projection), settings.seed, matrices)
        wanted = replace(wanted, units=describe_units(units))
        if settings.store_dtype == AUTO:
            exact = needs_exact_storage(settings.scoring_method, wanted.examples, wanted.width)
            usual = default_store_dtype(wanted.examples, wanted.width * wanted.terms, exact)
            wanted = replace(wanted, store_dtype=usual if existing is None else existing.store_dtype)
        if existing is None:
            return _begin(folder, inputs, settings, wanted, units)
        return _resume(folder, inputs, settings, wanted, existing)


def _begin(
    folder: StorePath, inputs: BuildInputs, settings: BuildSettings, wanted: Manifest, units: list[Unit]
) -> ShardWriter:
    """Decide coverage, pass and shard sizes of a new index; write its manifest.

    In an object store another process may begin the same index meanwhile: the first manifest counts.
    """
    draft = FeatureRunner(folder, wanted, inputs)
    draft.units = units
    manifest, trial = draft.choose_passes(inputs.rows, settings.memory, settings.batch_size)
    size = choose_shard_size(manifest.settled.pass_size, wanted.width, settings.memory)
    manifest = replace(manifest, settled=replace(manifest.settled, shard_size=size))
    writer = ShardWriter(folder, manifest, inputs, settings.workers, settings.ids)
    writer.runner.units = units
    (folder / layout.SHARDS).mkdir(exist_ok=True)
    write_probe(writer.runner, inputs.rows, trial)
    write_ids(folder, settings.ids)
    existing = manifest.begin(folder)
    if existing.id == manifest.id:
        return writer
    with torch_threads(existing.settled.threads):
        return _resume(folder, inputs, settings, wanted, existing)


def _resume(
    folder: StorePath, inputs: BuildInputs, settings: BuildSettings, wanted: Manifest, existing: Manifest
) -> ShardWriter:
    """Go on with an index in the folder; raises if it is not the wanted one."""
    writer = ShardWriter(folder, existing, inputs, settings.workers, settings.ids)
    differ = list_differences(existing, wanted)
    if not differ:  # else the probe may not even run
        differ = compare_task(writer.runner, inputs.rows)
    if differ:
        raise UndeError(
            f"{folder} already holds another index. What differs: {'; '.join(differ)}. "
            "Choose another folder, or delete this one"
        )
    (folder / layout.SHARDS).mkdir(exist_ok=True)
    if not is_valid_shard(probe_path(folder, existing), existing.id):
        restore_probe(writer.runner, inputs.rows)
    write_ids(folder, settings.ids, existing.generation)
    return writer


def default_store_dtype(examples: int, width: int, exact: bool) -> str:
    """The precision that "auto" is, for examples of so many features: small stores keep every digit, and so do those
    whose method needs it (`needs_exact_storage`). Others are a quarter of the size, at no loss of LDS that could be
    measured (docs/results.md, smaller stores).

    >>> default_store_dtype(1_000, 16_384, exact=False), default_store_dtype(50_000, 16_384, exact=False)
    ('float32', 'int8')
    """
    return "float32" if exact or 4 * examples * width <= EXACT else "int8"


def needs_exact_storage(method: Method, examples: int, width: int) -> bool:
    """Whether the kernel of a method may refuse features of so many columns that are stored in int8.

    >>> needs_exact_storage(TRAK(), 50_000, 16_384), needs_exact_storage(TRAK(), 2_000, 32_768)
    (False, True)
    """
    if not isinstance(method, Damped):
        return False
    whole = isinstance(method, TRAK)  # others invert by layer, or parameter
    wide = max(1.0, width / max(1, examples)) if whole else 1.0
    safe = method.relative and method.number >= DEFAULT_DAMPING
    return not safe or could_refuse(Int8.rounding, method.number, wide)


def choose_shard_size(pass_size: int, width: int, memory: int) -> int:
    """Examples in a shard: a whole number of passes, so that a resumed build runs the very same passes."""
    passes = min(SHARD_BYTES, memory // SHARD_SHARE) // max(1, 4 * pass_size * width)
    return pass_size * min(max(1, passes), SHARD_PASSES)


@dataclass(frozen=True)
class _Matrices:
    """The matrices of a projection that are not drawn from the seed: pca directions and second moments."""

    folder: StorePath
    inputs: BuildInputs
    method: Method
    names: list[str]
    scales: dict[str, Tensor]
    memory: int
    executor: Executor

    def resolve(self, wanted: Manifest, existing: Manifest | None) -> tuple[Manifest, dict[str, Tensor]]:
        """Read or compute them; the manifest with their fingerprint."""
        spec, home = Spec.parse(str(self.method.projection)), pca.home(self.folder)
        matrices = self.scales
        if existing is not None and existing.changes is not None and existing.matrices:
            stored = pca.read(home, existing)  # of the examples that the index was built on
            if all(name in stored and torch.equal(stored[name], x) for name, x in self.scales.items()):
                matrices = stored
            wanted = _with_directions(wanted, existing.settled.directions)
        elif spec.kind == "pca":
            scales = pca.fingerprint(self.scales)
            origin = [wanted.models, wanted.data, self.names, str(spec), wanted.seed, scales]
            matrices = pca.read_or_make(home, repr(origin), existing, lambda: self._directions(wanted, spec))
            size, rows = matrices[PASSES].tolist()
            wanted = _with_directions(wanted, [size, rows or None])
        elif matrices:
            origin = [self.names, pca.fingerprint(matrices)]
            matrices = pca.read_or_make(home, repr(origin), existing, lambda: self.scales)
        return replace(wanted, matrices=pca.fingerprint(matrices)), matrices

    def _directions(self, wanted: Manifest, spec: Spec) -> dict[str, Tensor]:
        size, rows = wanted.settled.directions or (None, None)
        directions, size, rows = pca.compute_directions(
            self.folder, self.inputs, wanted.settled.threads, self.names, spec, seed=wanted.seed,
            measure=self.method.measure, memory=self.memory, passes=(size, rows), executor=self.executor,
        )  # fmt: skip
        return directions | self.scales | {PASSES: torch.tensor([size, rows or 0])}


def _with_directions(manifest: Manifest, directions: list[int | None] | None) -> Manifest:
    return replace(manifest, settled=replace(manifest.settled, directions=directions))


def write_ids(folder: StorePath, ids: Sequence[Any] | None, generation: int = 0) -> None:
    if ids is not None:
        path = folder / layout.versioned_name(layout.IDS, generation)
        write_bytes(path, (json.dumps(list(ids)) + "\n").encode())
