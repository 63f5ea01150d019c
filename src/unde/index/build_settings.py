"""Settling an index: everything its bits depend on is decided once and recorded, before the first shard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unde import projection
from unde.checkpoints import resolve_checkpoint_weights
from unde.data import evenly
from unde.errors import UndeError
from unde.fingerprints import ids_fingerprint
from unde.gradients import Unit, make_units
from unde.gradients import adam_preconditioner as moments
from unde.gradients.coverage import EXAMPLES, CoverageTrial
from unde.gradients.feature_pass import Measurement, largest, threads
from unde.groups import Groups, trainable
from unde.index import pca as directions
from unde.index import pca as matrices
from unde.index.feature_runner import FeatureRunner, describe_units, name_failing_example
from unde.index.shard_writer import ShardWriter
from unde.index.validation import changed_task, list_differences, probe_of, restore_probe, write_probe
from unde.kernels.precision import could_refuse
from unde.methods import DEFAULT_DAMPING, TRAK, Damped, Method
from unde.parallel import SERIAL, Executor
from unde.parallel.model_transport import BuildInputs
from unde.projection import Spec
from unde.store import layout
from unde.store.codec import Int8
from unde.store.factored import AUTO
from unde.store.files import write_bytes
from unde.store.manifest import SCHEMA, Manifest, Settled
from unde.store.remote import StorePath
from unde.store.shards import is_valid_shard

EXACT = 2**28  # bytes up to which every digit is kept where nothing else is asked for
SHARD_BYTES = 2**24  # in float32: what allocators hand out again and again without asking the system
SHARD_SHARE = 8  # of the memory budget a shard may take one in so many: it is joined, packed and written
SHARD_PASSES = 64  # at most this much work is lost to a kill
PASSES = "passes"  # among matrices: how many examples, and rows, the passes had that found them


def settle(
    folder: StorePath,
    given: BuildInputs,
    method: Method,
    *,
    groups: Groups | str | Mapping[str, str],
    exclude: Sequence[str],
    store_dtype: str,
    seen_by: Method,
    seed: int,
    on_bad: str,
    checkpoint_weights: Sequence[float] | None,
    ids: Sequence[Any] | None,
    second_moments: Any,
    memory: int,
    workers: int,
    each: int | None,
    executor: Executor = SERIAL,
) -> ShardWriter:
    """The index that is asked for, as it was begun in the folder, or settled now and begun. Jobs have `each` threads,
    by default as many as there are now; pca directions are found by `executor`."""
    if workers < 0:
        raise UndeError(f"num_workers is {workers}: expected 0, or how many processes read the data")
    names, partition, scales = checked(given, method, groups, exclude, second_moments)
    models = given.models
    there = Manifest.read(folder) if (folder / layout.MANIFEST).exists() else None
    asked = Manifest(
        schema=SCHEMA,
        projection_version=projection.VERSION,
        method=method.describe(),
        task=given.task.identity(),
        examples=len(given.rows),
        store_dtype=store_dtype,
        seed=seed,
        on_bad=on_bad,
        units=[],
        groups={k: list(v) for k, v in partition.members.items()},
        models=models,
        checkpoint_weights=resolve_checkpoint_weights(checkpoint_weights, len(models), method.terms),
        data=given.data,
        ids=ids_fingerprint(ids),
        factors=method.factors,
        matrices="",
        settled=there.settled if there is not None else Settled(0, 0, each or torch.get_num_threads()),
    )

    def tried() -> list[int]:
        return sorted({*evenly(len(given.rows), EXAMPLES), largest(given.rows)})

    with (
        threads(asked.settled.threads),
        name_failing_example(given.model, given.task, given.rows, tried, ids),
    ):
        asked, found = _with_matrices(folder, given, method, names, asked, there, scales, memory, executor)
        units = make_units(given.model, names, str(method.projection), seed, found)
        asked = replace(asked, units=describe_units(units))
        if store_dtype == AUTO:
            exact = rounding_decides(seen_by, asked.examples, asked.width)
            usual = stored_in(asked.examples, asked.width * asked.terms, exact)
            asked = replace(asked, store_dtype=usual if there is None else there.store_dtype)
        if there is None:
            return _begun(folder, given, asked, units, ids, memory, workers)
        return _gone_on(folder, given, asked, there, ids, workers)


def stored_in(examples: int, width: int, exact: bool) -> str:
    """The precision that "auto" is, for examples of so many features: small stores keep every digit, and so do those
    whose method needs it (`rounding_decides`). Others are a quarter of the size, at no loss of LDS that could be
    measured (docs/results.md, smaller stores).

    >>> stored_in(1_000, 16_384, exact=False), stored_in(50_000, 16_384, exact=False)
    ('float32', 'int8')
    """
    return "float32" if exact or 4 * examples * width <= EXACT else "int8"


def rounding_decides(method: Method, examples: int, width: int) -> bool:
    """Whether the kernel of a method may refuse features of so many columns that are stored in int8.

    >>> rounding_decides(TRAK(), 50_000, 16_384), rounding_decides(TRAK(), 2_000, 32_768)
    (False, True)
    """
    if not isinstance(method, Damped):
        return False
    whole = isinstance(method, TRAK)  # others invert by layer, or parameter
    wide = max(1.0, width / max(1, examples)) if whole else 1.0
    safe = method.relative and method.number >= DEFAULT_DAMPING
    return not safe or could_refuse(Int8.rounding, method.number, wide)


def checked(
    given: BuildInputs,
    method: Method,
    groups: Groups | str | Mapping[str, str],
    exclude: Sequence[str],
    second_moments: Any,
) -> tuple[list[str], Groups, dict[str, Tensor]]:
    """The parameters, their groups and scales; raises for what cannot be right before anything is written."""
    if method.steps > 1 and given.checkpoints is not None:
        raise UndeError(f"{method} sums over steps of trajectories: it takes one checkpoint")
    names, partition = trainable(given.model, exclude), Groups.parse(groups, given.model, exclude)
    partition.of(names)
    _ = given.models, given.data  # read twice, and the same
    if second_moments is None:
        return names, partition, {}
    if method.factors:
        raise UndeError(
            "EKFAC needs the two sides of a gradient apart, but second_moments weighs its entries one by one: "
            "use one of the two"
        )
    return names, partition, moments.scales(second_moments, given.model, names)


def _begun(
    folder: StorePath,
    given: BuildInputs,
    asked: Manifest,
    units: list[Unit],
    ids: Sequence[Any] | None,
    memory: int,
    workers: int,
) -> ShardWriter:
    """A new index: coverage, pass and shard sizes are decided, then its manifest is written. In a store of objects
    another process may begin the same index at the same time: whoever is first has settled it."""
    draft = FeatureRunner(folder, asked, given)
    draft.units = units
    chosen, ready = draft.choose_passes(given.rows, memory)
    size, terms = chosen.settled.pass_size, range(len(asked.models))
    ahead = 0 if chosen.settled.rows else _ahead([ready.get(c) for c in terms], draft.measurement, size)
    settled = replace(chosen.settled, shard_size=shard_size(size, asked.width, memory), ahead=ahead)
    manifest = replace(asked, settled=settled)
    writer = ShardWriter(folder, manifest, given, workers, ids)
    writer.runner.units = units
    (folder / layout.SHARDS).mkdir(exist_ok=True)
    write_probe(writer.runner, given.rows, ready.get(0))
    write_ids(folder, ids)
    there = manifest.begin(folder)
    if there.id == manifest.id:
        writer.ready = ready if settled.ahead else {}
        return writer
    with threads(there.settled.threads):
        return _gone_on(folder, given, asked, there, ids, workers)


def _ahead(tried: Sequence[CoverageTrial | None], what: Measurement, size: int) -> int:
    """How many examples were tried under every checkpoint that are the first of the data, and in the way of a pass:
    theirs need not be run again. 0 where there is something else to keep of a pass."""
    counts = {0 if t is None else len(t.digests) for t in tried}
    if len(counts) > 1 or what.factors is not None or what.beside:
        return 0
    return min(counts) if min(counts) <= size else 0


def _gone_on(
    folder: StorePath,
    given: BuildInputs,
    asked: Manifest,
    there: Manifest,
    ids: Sequence[Any] | None,
    workers: int,
) -> ShardWriter:
    """An index that was begun: refused if another is asked for."""
    writer = ShardWriter(folder, there, given, workers, ids)
    differ = list_differences(there, asked)
    if not differ:  # else the probe may not even run
        differ = changed_task(writer.runner, given.rows)
    if differ:
        raise UndeError(
            f"{folder} already holds another index. What differs: {'; '.join(differ)}. "
            "Choose another folder, or delete this one"
        )
    (folder / layout.SHARDS).mkdir(exist_ok=True)
    if not is_valid_shard(probe_of(folder, there), there.id):
        restore_probe(writer.runner, given.rows)
    write_ids(folder, ids, there.generation)
    return writer


def shard_size(pass_size: int, width: int, memory: int) -> int:
    """Examples in a shard: a whole number of passes, so that a resumed build runs the very same passes."""
    passes = min(SHARD_BYTES, memory // SHARD_SHARE) // max(1, 4 * pass_size * width)
    return pass_size * min(max(1, passes), SHARD_PASSES)


def _with_matrices(
    folder: StorePath,
    given: BuildInputs,
    method: Method,
    names: list[str],
    asked: Manifest,
    there: Manifest | None,
    scales: dict[str, Tensor],
    memory: int,
    executor: Executor,
) -> tuple[Manifest, dict[str, Tensor]]:
    """What the projection needs that is not drawn from the seed."""
    spec = Spec.parse(str(method.projection))
    found = scales
    if there is not None and there.changes is not None and there.matrices:
        kept = matrices.read(matrices.home(folder), there)  # of the examples that it was built on
        if all(name in kept and torch.equal(kept[name], value) for name, value in scales.items()):
            found = kept
        asked = replace(asked, settled=replace(asked.settled, directions=there.settled.directions))
    elif spec.kind == "pca":
        origin = [asked.models, asked.data, names, str(spec), asked.seed, matrices.fingerprint(found)]

        def make() -> dict[str, Tensor]:
            size, rows = asked.settled.directions or (None, None)
            made, size, rows = directions.found(
                folder, given, asked.settled.threads, names, spec, seed=asked.seed, measure=method.measure,
                memory=memory, passes=(size, rows), executor=executor,
            )  # fmt: skip
            return made | scales | {PASSES: torch.tensor([size, rows or 0])}

        found = matrices.made_once(matrices.home(folder), repr(origin), there, make)
        size, rows = found[PASSES].tolist()
        asked = replace(asked, settled=replace(asked.settled, directions=[size, rows or None]))
    elif found:
        origin = [names, matrices.fingerprint(found)]
        found = matrices.made_once(matrices.home(folder), repr(origin), there, lambda: scales)
    return replace(asked, matrices=matrices.fingerprint(found)), found


def write_ids(folder: StorePath, ids: Sequence[Any] | None, generation: int = 0) -> None:
    if ids is not None:
        path = folder / layout.versioned_name(layout.IDS, generation)
        write_bytes(path, (json.dumps(list(ids)) + "\n").encode())
