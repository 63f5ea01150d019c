"""Matrices of the projection that are not drawn from the seed: pca directions and second moments.

They are stored beside the manifest; a resumed build reads them, so that all shards are projected alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unde import console
from unde.checkpoints import load_checkpoint
from unde.errors import UndeError
from unde.gradients.feature_pass import set_rows, torch_threads
from unde.gradients.pca import CovariancePass
from unde.methods import Method
from unde.parallel import SERIAL, Executor, Job, run_with_progress
from unde.parallel.model_transport import BuildInputs
from unde.projection import Spec
from unde.store.job_results import Results, scratch
from unde.store.layout import FISHERS, MANIFEST, MATRICES
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import ShardError, checksum, copy_tensors, create_shard, read_shard, write_shard

PASSES = "passes"  # among the matrices: examples and rows in the passes that computed them


class _DirectionJobs:
    """The context of jobs that compute covariances; `settings` are those of `CovariancePass`."""

    def __init__(
        self,
        inputs: BuildInputs,
        threads: int | None,
        rows: int | None,
        settings: dict[str, Any],
        results: Results,
    ) -> None:
        self.inputs, self.threads, self.rows, self.settings = inputs, threads, rows, settings
        self.results = results
        self._open = ExitStack()

    def __reduce__(self) -> tuple[Any, ...]:
        return _DirectionJobs, (self.inputs, self.threads, self.rows, self.settings, self.results)

    @cached_property
    def covariance_pass(self) -> CovariancePass:
        inputs = self.inputs
        self._open.enter_context(load_checkpoint(inputs.model, inputs.checkpoints))
        task = set_rows(inputs.task, self.rows)
        return self._open.enter_context(CovariancePass(inputs.model, task, inputs.rows, **self.settings))

    def close(self) -> None:
        self._open.close()


def _compute_covariances(work: _DirectionJobs, i: int) -> None:
    with torch_threads(work.threads):
        work.results.put((i,), {"sums": work.covariance_pass.covariances(i)})


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
        return copy_tensors(read_shard(path, owner))
    except ShardError as e:
        damage = e
    if existing is None:
        path.unlink(missing_ok=True)  # of an index that was never begun
    matrices = make()
    if existing is None:
        if not create_shard(path, owner, matrices):  # another process begins the same index at the same time
            return read_shard(path, owner)
    elif fingerprint(matrices) == existing.matrices:
        console.note(f"{damage}: made anew, as it was")
        write_shard(path, owner, matrices)
    return matrices  # else they are of another index, which is refused for what differs


def fingerprint(matrices: dict[str, Tensor]) -> str:
    return checksum(matrices) if matrices else ""


def read(folder: StorePath, manifest: Manifest) -> dict[str, Tensor]:
    """The matrices that an index was built with."""
    if not manifest.matrices:
        return {}
    path = folder / MATRICES
    advice = f"delete {path} and run the same Index.build again, which makes it anew as it was"
    try:
        matrices = copy_tensors(read_shard(path, None, verify=False))
    except ShardError as e:
        raise UndeError(f"{e}: queries cannot be projected as the index was; {advice}") from None
    if fingerprint(matrices) != manifest.matrices:
        raise UndeError(f"{path} is damaged, or of another index: queries cannot be projected; {advice}")
    return matrices


@dataclass(frozen=True)
class MatrixSource:
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
        spec, place = Spec.parse(str(self.method.projection)), home(self.folder)
        matrices = self.scales
        if existing is not None and existing.changes is not None and existing.matrices:
            stored = read(place, existing)  # of the examples that the index was built on
            if all(name in stored and torch.equal(stored[name], x) for name, x in self.scales.items()):
                matrices = stored
            wanted = _with_directions(wanted, existing.resolved.directions)
        elif spec.kind == "pca":
            scales = fingerprint(self.scales)
            origin = [wanted.models, wanted.data, self.names, str(spec), wanted.seed, scales]
            matrices = read_or_make(place, repr(origin), existing, lambda: self._directions(wanted, spec))
            size, rows = matrices[PASSES].tolist()
            wanted = _with_directions(wanted, [size, rows or None])
        elif matrices:
            origin = [self.names, fingerprint(matrices)]
            matrices = read_or_make(place, repr(origin), existing, lambda: self.scales)
        return replace(wanted, matrices=fingerprint(matrices)), matrices

    def _directions(self, wanted: Manifest, spec: Spec) -> dict[str, Tensor]:
        """Directions from passes over a sample, which are jobs; the scales; and the size of the passes."""
        size, rows = wanted.resolved.directions or (None, None)
        settings: dict[str, Any] = {
            "names": self.names,
            "spec": spec,
            "seed": wanted.seed,
            "memory": self.memory,
        }
        settings |= {"measure": self.method.measure, "size": size}
        work = _DirectionJobs(self.inputs, wanted.resolved.threads, rows, settings, Results("directions"))
        try:
            run = work.covariance_pass
            work.settings["size"], work.rows = run.size, run.rows  # as they were decided here
            jobs: list[Job] = [(i,) for i in range(len(run.passes))]
            executor = self.executor if len(jobs) > 1 and self.executor.exclusive else SERIAL
            with nullcontext() if executor.in_process else scratch(self.folder) as work.results.folder:
                done = sorted(run_with_progress(executor, _compute_covariances, work, jobs, "pca directions"))
                total = work.results.take(done[0])["sums"].clone()
                for job in done[1:]:
                    total += work.results.take(job)["sums"]
            passes = {PASSES: torch.tensor([run.size or 1, run.rows or 0])}
            return run.directions(total) | self.scales | passes
        finally:
            work.close()


def _with_directions(manifest: Manifest, directions: list[int | None] | None) -> Manifest:
    return replace(manifest, resolved=replace(manifest.resolved, directions=directions))
