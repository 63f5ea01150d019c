"""Matrices of the projection that are not drawn from the seed: whitening and second moments.

They are stored beside the manifest; a resumed build reads them, so that all shards are projected alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unde import console, methods
from unde.checkpoints import load_checkpoint
from unde.data import Rows, to_device
from unde.errors import UndeError
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import DAMPINGS, make_units, placement
from unde.gradients.statistics import Passes, Statistics
from unde.gradients.whitening import fit_whitening
from unde.methods import EKFAC, Fisher, Method
from unde.parallel.model_transport import BuildInputs, ModelInputs
from unde.projection import MOST_FACTORS, Spec
from unde.store.factored import choose_ranks, leading, sides_of
from unde.store.layout import FISHERS, MANIFEST, MATRICES
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import (
    MAPPED,
    ShardError,
    checksum,
    copy_tensors,
    create_shard,
    empty_tensor,
    read_shard,
    write_shard,
)
from unde.tasks.base import Task

PASSES = "passes"  # among the matrices: examples and rows in the passes that computed them
SAMPLE = 32  # examples whose singular values decide how many outer products of each matrix are kept
SHARE = 8  # of fewer training examples one in so many


def home(folder: StorePath) -> StorePath:
    """The folder of the matrices of an index: gradients with other labels share those of their index."""
    inside = folder.name in FISHERS.values() and (folder.parent / MANIFEST).exists()
    return folder.parent if inside else folder


def read_or_make(
    folder: StorePath, origin: str, existing: Manifest | None, make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Read the matrices in the folder if they were made from `origin`, else make and store them.

    Those of an `existing` index are replaced by equal ones only: if the file is damaged or missing.
    """
    path, owner = folder / MATRICES, hashlib.blake2b(origin.encode(), digest_size=16).hexdigest()
    try:
        return _in_memory(read_shard(path, owner))
    except ShardError as e:
        damage = e
    if existing is None:
        path.unlink(missing_ok=True)  # of an index that was never begun
    matrices = make()
    if existing is None:
        created = create_shard(
            path, owner, matrices
        )  # unless another process begins the same index meanwhile
        if not created or _are_large(matrices):
            return read_shard(path, owner)
    elif fingerprint(matrices) == existing.matrices:
        console.note(f"{damage}: made anew, as it was")
        write_shard(path, owner, matrices)
    return matrices  # else they are of another index, which is refused for what differs


def _in_memory(mapped: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies, which do not depend on the file; large matrices stay mapped from it."""
    return mapped if _are_large(mapped) else copy_tensors(mapped)


def _are_large(matrices: dict[str, Tensor]) -> bool:
    return sum(x.nbytes for x in matrices.values()) > MAPPED


def fingerprint(matrices: dict[str, Tensor]) -> str:
    return checksum(matrices) if matrices else ""


def read(folder: StorePath, manifest: Manifest) -> dict[str, Tensor]:
    """The matrices that an index was built with."""
    if not manifest.matrices:
        return {}
    path = folder / MATRICES
    advice = f"delete {path} and run the same Index.build again, which makes it anew as it was"
    try:
        matrices = _in_memory(read_shard(path, None, verify=False))
    except ShardError as e:
        raise UndeError(f"{e}: queries cannot be projected as the index was; {advice}") from None
    if fingerprint(matrices) != manifest.matrices:
        raise UndeError(f"{path} is damaged, or of another index: queries cannot be projected; {advice}")
    return matrices


def resolve(
    folder: StorePath,
    inputs: BuildInputs,
    names: list[str],
    scales: dict[str, Tensor],
    memory: int,
    wanted: Manifest,
    existing: Manifest | None,
) -> tuple[Manifest, dict[str, Tensor]]:
    """Read or compute the matrices of an index; return its manifest with their fingerprint, and them."""
    place, matrices, method = home(folder), scales, methods.parse(wanted.method)
    if existing is not None and existing.changes is not None and existing.matrices:
        stored = read(place, existing)  # of the examples that the index was built on
        if all(name in stored and torch.equal(stored[name], x) for name, x in scales.items()):
            matrices = stored
        wanted = _with_directions(wanted, existing.resolved.directions)
    elif method.whitened:  # any number of outer products has the same whitening
        origin = [wanted.models, wanted.data, names, wanted.method | {"projection": "factored"}]
        matrices = read_or_make(
            place, repr(origin), existing, lambda: _whitening(inputs, names, method, memory, wanted)
        )
        size, rows = matrices[PASSES].tolist()
        wanted = _with_directions(wanted, [size, rows or None])
    elif scales:
        matrices = read_or_make(place, repr([names, fingerprint(scales)]), existing, lambda: scales)
    return replace(wanted, matrices=fingerprint(matrices)), matrices


def _whitening(
    inputs: BuildInputs, names: list[str], method: Method, memory: int, wanted: Manifest
) -> dict[str, Tensor]:
    """Bases, eigenvalues and damping of EKFAC, averaged over checkpoints, and the size of the passes."""
    assert isinstance(method, EKFAC)
    recorded = wanted.resolved.directions
    data = curvature_data(inputs, inputs.rows, names, method, range(len(wanted.models)))
    given = None if recorded is None else (recorded[0] or 1, recorded[1])
    matrices, (size, rows) = fit_whitening(data, method.kernel.dampings, memory, given, allocate=empty_tensor)
    passes = size, rows
    return matrices | _energies(data, passes, matrices) | {PASSES: torch.tensor([size, rows or 0])}


def _energies(data: Statistics, passes: Passes, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of each matrix, "energies/<name>": mean squares of the largest singular values of its whitened gradients."""
    units = make_units(data.model, data.names, "factored(1)", 0, matrices)
    found, sample = dict[str, Tensor](), min(SAMPLE, -(-len(data.rows) // SHARE))
    for features in data.features(units, passes, "whitening: ranks", sample=sample):
        for u in units:
            if len(u.shape) < 2:
                continue
            left, right = leading(features[:, u.columns].unflatten(1, (u.shape[0], -1)), MOST_FACTORS)
            squares = (left.square().sum(1) * right.square().sum(1)).double().sum(0)
            key = f"energies/{u.name}"
            found[key] = found[key] + squares if key in found else squares
    return found


def with_ranks(
    units: Sequence[Mapping[str, Any]], projection: str, matrices: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """The parameters with the number of outer products to keep of each matrix, where whitening was computed."""
    spec, keys = Spec.parse(projection), [f"energies/{u['name']}" for u in units]
    if spec.kind != "factored" or not any(key in matrices for key in keys):
        return [dict(u) for u in units]
    energies = [matrices[key].tolist() if key in matrices else [] for key in keys]
    ranks = choose_ranks(spec.size, sides_of(units, projection), energies)
    return [{**u, "rank": r} if len(u["shape"]) > 1 else dict(u) for u, r in zip(units, ranks)]


def curvature_data(
    inputs: ModelInputs, rows: Rows, names: Sequence[str], method: Method, checkpoints: Sequence[int]
) -> Statistics:
    """What the kernel of a method is computed from: gradients of the data under these checkpoints, for EKFAC with the
    labels that its Fisher matrix asks for."""
    statistics = method.statistics if isinstance(method, EKFAC) else method
    if isinstance(statistics, Fisher):
        statistics = resolve_labels(statistics, inputs.model, inputs.task, rows)
    return Statistics(
        inputs.model,
        inputs.task,
        rows,
        names,
        [statistics.measure_of(term) for term in range(statistics.terms)],
        [partial(load_checkpoint, inputs.model, inputs.checkpoints, c) for c in checkpoints],
    )


def whitening(folder: StorePath, manifest: Manifest) -> dict[str, tuple[Tensor, float]]:
    """Λ and λ of each parameter of an index with whitened features."""
    matrices = read(home(folder), manifest)
    lam = matrices[DAMPINGS].tolist()
    return {name: (matrices[f"values/{name}"], lam[i]) for i, name in enumerate(manifest.unit_names)}


def resolve_labels(probe: Fisher, model: nn.Module, task: Task, rows: Rows) -> Fisher:
    """The method with the number of labels that the task has."""
    with frozen_eval(model), torch.no_grad():
        return probe.resolve_labels(task, model, to_device(rows.batch([0]), placement(model)[0]))


def _with_directions(manifest: Manifest, directions: list[int | None] | None) -> Manifest:
    return replace(manifest, resolved=replace(manifest.resolved, directions=directions))
