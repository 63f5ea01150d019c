"""Matrices of the projection that are not drawn from the seed: pca directions and second moments.

They are stored beside the manifest; a resumed build reads them, so that all shards are projected alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cached_property
from typing import Any

from torch import Tensor

from unde import console
from unde.checkpoints import loaded, select_checkpoint
from unde.errors import UndeError
from unde.gradients.feature_pass import set_rows, torch_threads
from unde.gradients.pca import CovariancePass
from unde.parallel import SERIAL, Executor, Job, run_with_progress
from unde.parallel.model_transport import BuildInputs
from unde.projection import Spec
from unde.store.job_results import Results, scratch
from unde.store.layout import FISHERS, MANIFEST, MATRICES
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import ShardError, checksum, copy_tensors, create_shard, read_shard, write_shard


class _DirectionJobs:
    """The context of these jobs. `settings` are those of `CovariancePass`."""

    def __init__(
        self, inputs: BuildInputs, each: int | None, rows: int | None, settings: dict[str, Any]
    ) -> None:
        self.inputs, self.each, self.rows, self.settings = inputs, each, rows, settings
        self.results = Results("directions")
        self._open = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("inputs", "each", "rows", "settings", "results")}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        results = sent.pop("results")
        self.__init__(**sent)
        self.results = results

    @cached_property
    def covariance_pass(self) -> CovariancePass:
        inputs = self.inputs
        self._open.enter_context(loaded(inputs.model, select_checkpoint(inputs.checkpoints, 0)))
        made = CovariancePass(inputs.model, set_rows(inputs.task, self.rows), inputs.rows, **self.settings)
        return self._open.enter_context(made)

    def close(self) -> None:
        self._open.close()


def _compute_covariances(work: _DirectionJobs, i: int) -> None:
    with torch_threads(work.each):
        work.results.put((i,), {"sums": work.covariance_pass.covariances(i)})


def compute_directions(
    folder: StorePath,
    inputs: BuildInputs,
    each: int | None,
    names: list[str],
    spec: Spec,
    *,
    seed: int,
    measure: str,
    memory: int,
    passes: tuple[int | None, int | None],
    executor: Executor = SERIAL,
) -> tuple[dict[str, Tensor], int, int | None]:
    """The directions by passes over a sample as jobs, and the examples and rows of these passes."""
    settings = {
        "names": names,
        "spec": spec,
        "seed": seed,
        "measure": measure,
        "memory": memory,
        "size": passes[0],
    }
    work = _DirectionJobs(inputs, each, passes[1], settings)
    try:
        at = work.covariance_pass
        work.settings["size"], work.rows = at.size, at.rows  # as they were settled here
        jobs: list[Job] = [(i,) for i in range(len(at.passes))]
        runs = executor if len(jobs) > 1 and executor.exclusive else SERIAL
        with nullcontext() if runs.in_process else scratch(folder) as work.results.folder:
            total: Tensor | None = None
            for job in sorted(run_with_progress(runs, _compute_covariances, work, jobs, "pca directions")):
                part = work.results.take(job)["sums"]
                total = part.clone() if total is None else total.add_(part)
        assert total is not None
        return at.directions(total), at.size or 1, at.rows
    finally:
        work.close()


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
