"""What jobs of a build share: the settled index, and the model, task and data, at hand or made from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from unde import methods
from unde.checkpoints import Checkpoint
from unde.gradients import Coverage, Unit, make_units
from unde.gradients.factors import gathered
from unde.gradients.feature_pass import Batch, FeaturePass, Measurement, cuts, resized
from unde.gradients.record import restored
from unde.index import matrices
from unde.index.background_writer import Behind
from unde.index.running import Running
from unde.methods import Method
from unde.parallel import Job
from unde.parallel.model_transport import BuildInputs
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.tasks.base import Task
from unde.tasks.batching import recut


class Context:
    """A settled index that is being computed. It can be pickled where there is a recipe: what is at hand stays."""

    def __init__(
        self,
        folder: StorePath,
        manifest: Manifest,
        given: BuildInputs,
        workers: int = 0,
        ids: Sequence[Any] | None = None,
    ) -> None:
        self.folder, self.manifest, self.given, self.workers, self.ids = folder, manifest, given, workers, ids
        self.advance: Callable[[int], None] = lambda count: None
        self.upcoming: list[Job] = []  # jobs in the order that they will be asked for, if known
        self.passing = Running()
        self.behind = Behind()
        self._stream: tuple[list[Job], Generator[Batch]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("folder", "manifest", "given", "workers", "ids")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, sent: dict[str, Any]) -> None:
        sent["given"].must_be(sent["manifest"], sent["folder"], data=True)
        self.__init__(**sent)

    @cached_property
    def method(self) -> Method:
        return methods.parse(self.manifest.method)

    @cached_property
    def units(self) -> list[Unit]:
        m = self.manifest
        found = matrices.read(matrices.home(self.folder), m)
        return make_units(self.given.model, m.unit_names, str(self.method.projection), m.seed, found)

    @cached_property
    def measurement(self) -> Measurement:
        m, method = self.manifest, self.method
        factors = gathered(m.units, str(method.projection)) if m.factors else None
        return Measurement(self.units, method.measure, method.beside, factors)

    def model_of(self, c: int) -> int:
        """Which of the checkpoints term c is of."""
        return c * len(self.manifest.models) // self.manifest.terms

    def coverage(self, c: int) -> Coverage:
        """Which way each parameter goes, as it was decided when the build began."""
        records = self.manifest.settled.coverage
        assert records is not None
        return restored(records[min(self.model_of(c), len(records) - 1)], self.given.model, self.units)

    def running(self, c: int) -> FeaturePass:
        """The pass under checkpoint or step c."""
        model, checkpoint = self.given.model, checkpoint_of(self.given.checkpoints, self.model_of(c))

        def made() -> FeaturePass:
            task = step_of(resized(self.given.task, self.manifest.settled.rows), self.method, c)
            what = replace(self.measurement, measure=self.method.measure_of(c))
            return FeaturePass(model, task, what, self.coverage(c))

        return self.passing.under(c, model, checkpoint, made)

    def batches(self, c: int, s: int) -> Iterator[Batch]:
        """The batches of one shard. Worker processes read ahead through the shards that are `upcoming`."""
        if not self.workers:
            return self.given.rows.batches(self.cuts(s))
        if self._stream is None or self._stream[0][:1] != [(c, s)]:
            at = self.upcoming.index((c, s)) if (c, s) in self.upcoming else None
            jobs: list[Job] = [(c, s)] if at is None else self.upcoming[at:]
            ranges = [r for _, shard in jobs for r in self.cuts(shard)]
            self._stream = (jobs, self.given.rows.batches(ranges, self.workers))
        jobs, stream = self._stream
        self._stream = (jobs[1:], stream)
        return (next(stream) for _ in self.cuts(s))

    def drawn(self, where: Sequence[int]) -> list[int]:
        """The numbers under which examples are measured."""
        return [self.manifest.drawn[i] for i in where]

    def cuts(self, s: int) -> list[range]:
        """The rows of each pass of a shard."""
        rows = self.manifest.shards[s]
        return cuts(range(rows.start, rows.stop), self.manifest.settled.pass_size)

    def close(self) -> None:
        """The model as it was, and nobody reading ahead or writing."""
        self.behind.close()
        if self._stream is not None:
            self._stream[1].close()
            self._stream = None
        self.passing.close()


def checkpoint_of(checkpoints: Sequence[Checkpoint] | None, c: int) -> Checkpoint | None:
    return None if checkpoints is None else checkpoints[c]


def step_of(task: Task, method: Method, c: int) -> Task:
    """The task at step c, for methods that keep the steps of a trajectory apart."""
    return task if method.steps == 1 else recut(task, task.cutting.step(c, method.steps))
