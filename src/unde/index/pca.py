"""The pass that finds pca directions, as jobs: covariances of a sample, pass by pass, added up in their order."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import cached_property
from typing import Any

from torch import Tensor

from unde.checkpoints import loaded
from unde.gradients.feature_pass import resized, threads
from unde.gradients.pca import Gathering
from unde.index.build_context import checkpoint_of
from unde.parallel import SERIAL, Executor, Job, shown
from unde.parallel.model_transport import BuildInputs
from unde.projection import Spec
from unde.store.job_results import Results, scratch
from unde.store.remote import StorePath


class Sample:
    """The context of these jobs. `settings` are those of `Gathering`."""

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
    def gathering(self) -> Gathering:
        given = self.given
        self._open.enter_context(loaded(given.model, checkpoint_of(given.checkpoints, 0)))
        made = Gathering(given.model, resized(given.task, self.rows), given.rows, **self.settings)
        return self._open.enter_context(made)

    def close(self) -> None:
        self._open.close()


def gather(sample: Sample, i: int) -> None:
    with threads(sample.each):
        sample.results.put((i,), {"sums": sample.gathering.covariances(i)})


def found(
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
        runs = executor if len(jobs) > 1 and executor.alone else SERIAL
        with nullcontext() if runs.here else scratch(folder) as sample.results.folder:
            total: Tensor | None = None
            for job in sorted(shown(runs, gather, sample, jobs, "pca directions")):
                part = sample.results.take(job)["sums"]
                total = part.clone() if total is None else total.add_(part)
        assert total is not None
        return at.directions(total), at.size or 1, at.rows
    finally:
        sample.close()
