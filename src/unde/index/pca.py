"""The pass that finds pca directions, as jobs: covariances of a sample, pass by pass, added up in their order."""

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
from unde.store.file_watch import copy_tensors
from unde.store.job_results import Results, scratch
from unde.store.layout import FISHERS, MANIFEST, MATRICES
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import ShardError, checksum, create_shard, read_shard, write_shard


class Sample:
    """The context of these jobs. `settings` are those of `CovariancePass`."""

    def __init__(
        self, given: BuildInputs, each: int | None, rows: int | None, settings: dict[str, Any]
    ) -> None:
        self.given, self.each, self.rows, self.settings = given, each, rows, settings
        self.results = Results("directions")
        self._open = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("given", "each", "rows", "settings", "results")}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        results = sent.pop("results")
        self.__init__(**sent)
        self.results = results

    @cached_property
    def gathering(self) -> CovariancePass:
        given = self.given
        self._open.enter_context(loaded(given.model, select_checkpoint(given.checkpoints, 0)))
        made = CovariancePass(given.model, set_rows(given.task, self.rows), given.rows, **self.settings)
        return self._open.enter_context(made)

    def close(self) -> None:
        self._open.close()


def gather(sample: Sample, i: int) -> None:
    with torch_threads(sample.each):
        sample.results.put((i,), {"sums": sample.gathering.covariances(i)})


def compute_directions(
    folder: StorePath,
    given: BuildInputs,
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
    """The matrices, and how many examples, and rows, their passes had."""
    settings = {
        "names": names,
        "spec": spec,
        "seed": seed,
        "measure": measure,
        "memory": memory,
        "size": passes[0],
    }
    sample = Sample(given, each, passes[1], settings)
    try:
        at = sample.gathering
        sample.settings["size"], sample.rows = at.size, at.rows  # as they were settled here
        jobs: list[Job] = [(i,) for i in range(len(at.passes))]
        runs = executor if len(jobs) > 1 and executor.exclusive else SERIAL
        with nullcontext() if runs.in_process else scratch(folder) as sample.results.folder:
            total: Tensor | None = None
            for job in sorted(run_with_progress(runs, gather, sample, jobs, "pca directions")):
                part = sample.results.take(job)["sums"]
                total = part.clone() if total is None else total.add_(part)
        assert total is not None
        return at.directions(total), at.size or 1, at.rows
    finally:
        sample.close()


def home(folder: StorePath) -> StorePath:
    """Where the matrices of an index are: gradients with other labels are projected as those that they belong to."""
    inside = folder.name in FISHERS.values() and (folder.parent / MANIFEST).exists()
    return folder.parent if inside else folder


def read_or_make(
    folder: StorePath, origin: str, existing: Manifest | None, make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The matrices in the folder if they were made from `origin`, else new ones, which are kept there.

    Those of an index that was begun (`existing`) are replaced by equal ones only: where its file is damaged or gone.
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
