"""Features of rows under the checkpoints of an index, in this process or as jobs for an executor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unde import console, methods
from unde.checkpoints import fingerprints, load_checkpoint
from unde.data import Rows, evenly, to_device
from unde.default_device import program_default
from unde.errors import BadExample, UndeError
from unde.fingerprints import SAMPLED, ModelWatch, reads_differently, to_digest, to_signed_tensor
from unde.gradients import Coverage, Unit, describe_units, make_units
from unde.gradients.coverage import EXAMPLES, plan_coverage
from unde.gradients.factors import factor_sizes
from unde.gradients.feature_pass import (
    FeaturePass,
    Measurement,
    choose_pass_size,
    exclusive,
    largest,
    set_rows,
    split_range,
)
from unde.gradients.hooks import restore_coverage
from unde.gradients.parameters import placement
from unde.index import projection_matrices
from unde.index.query_features import BadQuery, QueryFeatures
from unde.methods import Method
from unde.parallel import SERIAL, Executor, Job, run_with_progress
from unde.parallel.model_transport import BuildInputs, ModelInputs
from unde.projection import checkpoint_seed
from unde.store.layout import SCRATCH
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import Results, empty_tensor, scratch
from unde.tasks.base import Task, with_batching
from unde.tasks.tokens import Unreadable

Patch = Callable[[nn.Module], AbstractContextManager[Any]]  # changes the model inside a block
_FOREIGN = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)


class FeatureRunner:
    """The model, task and checkpoints of an index with what its manifest records: units, coverage and pass size.

    At most one pass is open; `close` restores the model. A runner can be pickled if its inputs have a recipe. `watch`
    observes model and checkpoints since they were compared with the index; None: they were not.
    """

    def __init__(
        self,
        folder: StorePath,
        manifest: Manifest,
        inputs: ModelInputs,
        executor: Executor = SERIAL,
        watch: ModelWatch | None = None,
    ) -> None:
        self.folder, self.manifest, self.inputs = folder, manifest, inputs
        self.executor, self._watch = executor, watch
        self._pass: tuple[int, FeaturePass, ExitStack] | None = None
        self._coverage: dict[int, Coverage] = {}
        self._drawn: tuple[int, list[Unit]] | None = None  # units of the last checkpoint but the first

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "manifest", "inputs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)
        self.inputs.check_model(self.manifest, self.folder)

    @cached_property
    def method(self) -> Method:
        return methods.parse(self.manifest.method)

    @cached_property
    def units(self) -> list[Unit]:
        """The units under the first checkpoint."""
        return self._make_units(0)

    def units_at(self, c: int) -> list[Unit]:
        """The units under checkpoint or step c."""
        at = self._checkpoint(c)
        if at == 0 or not self.manifest.resolved.per_checkpoint:
            return self.units
        if self._drawn is None or self._drawn[0] != at:
            self._drawn = None
            self._drawn = (at, self._make_units(at))
        return self._drawn[1]

    def _make_units(self, checkpoint: int) -> list[Unit]:
        m, seed = self.manifest, checkpoint_seed(self.manifest.seed, checkpoint)
        units = make_units(self.inputs.model, m.unit_names, str(self.method.projection), seed, self._matrices)
        if [u.columns for u in units] != m.columns:
            raise UndeError(f"the manifest of {self.folder} contradicts itself: build the index again")
        return units

    @property
    def _matrices(self) -> dict[str, Tensor]:
        """Matrices of the projection that are not drawn."""
        m = self.manifest
        return projection_matrices.read(projection_matrices.home(self.folder), m) if m.matrices else {}

    @cached_property
    def measurement(self) -> Measurement:
        m, method = self.manifest, self.method
        factors = factor_sizes(m.units, str(method.projection)) if m.factors else None
        return Measurement(self.units, method.measure, method.extra_measures, factors)

    def coverage(self, c: int) -> Coverage:
        """How the gradient of each parameter is taken under checkpoint or step c, as the manifest records it."""
        record, units = self.manifest.resolved.coverage or [], self.units_at(c)
        at = min(self._checkpoint(c), len(record) - 1)
        if units is not self.units:
            return restore_coverage(record[at], self.inputs.model, units)
        if at not in self._coverage:
            self._coverage[at] = restore_coverage(record[at], self.inputs.model, units)
        return self._coverage[at]

    def open_pass(self, c: int, patch: Patch = nullcontext, factors: bool = True) -> FeaturePass:
        """The pass under checkpoint or step c, with its weights loaded, unless it is already open."""
        if self._pass is not None and self._pass[0] == c:
            return self._pass[1]
        self.close()
        model, method = self.inputs.model, self.method
        with ExitStack() as stack:
            if self.inputs.checkpoints is not None:
                stack.enter_context(load_checkpoint(model, self.inputs.checkpoints, self._checkpoint(c)))
            stack.enter_context(patch(model))
            task = task_at_step(set_rows(self.inputs.task, self.manifest.resolved.rows), method, c)
            what = replace(self.measurement, units=self.units_at(c), measure=method.measure_of(c))
            what = what if factors else replace(what, factors=None)
            run = stack.enter_context(FeaturePass(model, task, what, self.coverage(c)))
            self._pass = (c, run, stack.pop_all())
        return run

    def close(self) -> None:
        """Restore the model."""
        if self._pass is not None:
            stack = self._pass[2]
            self._pass = None
            stack.close()

    def _checkpoint(self, c: int) -> int:
        """The checkpoint that term c belongs to."""
        return c * len(self.manifest.models) // self.manifest.terms

    def sample_numbers(self, where: Sequence[int]) -> list[int]:
        """The numbers that seed the random draws of training examples (labels, noise)."""
        return [self.manifest.numbers[i] for i in where]

    def check_model(self, full: bool = False) -> None:
        """Raise if weights or buffers are not those of the index.

        All of them are read if they were not compared before, or if something points to a change.
        """
        if not full and self._watch is not None and self._watch.unchanged():
            return
        if fingerprints(self.inputs.model, self.inputs.checkpoints) != self.manifest.models:
            raise UndeError(
                f"the model's weights are not those that {self.folder} was built with: they changed since. "
                "Restore them, or build another index"
            )
        self._watch = ModelWatch(self.inputs.model, self.inputs.checkpoints)

    def features(self, rows: Rows, patch: Patch = nullcontext) -> QueryFeatures:
        """Features of queries after a check of the model; `patch(model)` changes the model meanwhile."""
        where, m = evenly(len(rows), SAMPLED), self.manifest
        before = rows.digests(where)  # not after: a pass restores the random numbers that examples may draw
        features, values = empty_tensor(m.terms, len(rows), m.width), torch.empty(m.terms, len(rows))
        work, digests = _RowJobs(self, rows, patch=patch), [""] * len(rows)
        with exclusive(self.inputs.model):
            self.check_model()
            try:
                for (c, i), part in self._run(work):
                    here = slice(work.passes[i].start, work.passes[i].stop)
                    features[c, here], values[c, here] = part["features"], part["values"]
                    digests[here] = [to_digest(int(d)) for d in part["digest"]]
            finally:
                self.close()
            if self.inputs.checkpoints is not None or patch is not nullcontext:  # weights were replaced
                self._watch = ModelWatch(self.inputs.model, self.inputs.checkpoints)
        _check_finite(features)
        changed = [i for i, digest in zip(where, before) if digest != digests[i]]
        if changed:
            raise reads_differently(f"{changed[0]} of the queries")
        return QueryFeatures(m.lineage, features, values, digests)

    def passes(
        self, rows: Rows, c: int, where: Sequence[int] | None = None
    ) -> Iterator[tuple[range, Mapping[str, Tensor]]]:
        """(positions, features and digests) under checkpoint c, pass by pass in this process: of queries, or of the
        training examples `where`."""
        work = _RowJobs(self, rows, where)
        try:
            for i, here in enumerate(work.passes):
                yield here, work.compute_pass(c, i)
        finally:
            self.close()

    def _run(self, work: _RowJobs) -> Iterator[tuple[Job, Mapping[str, Tensor]]]:
        """The results of all jobs, in any order."""
        jobs: list[Job] = [(c, i) for c in range(self.manifest.terms) for i in range(len(work.passes))]
        title = "features of queries"
        if self.executor.in_process or len(jobs) == 1:
            with console.progress(title, len(jobs), len(jobs) > 1, unit="passes") as advance:
                for job in jobs:
                    yield job, work.compute_pass(*job)
                    advance(1)
            return
        self.inputs = self.inputs.portable(self.folder / SCRATCH, work.rows)
        with scratch(self.folder) as folder:
            work.results = Results(self.manifest.id, folder)
            for job in run_with_progress(
                self.executor, _RowJobs.write_pass, work, jobs, title, describe=work.describe, unit="passes"
            ):
                yield job, work.results.take(job)

    def choose_passes(self, rows: Rows, memory: int, batch_size: int | None = None) -> Manifest:
        """Decide coverage and pass size from `rows`: the manifest with both."""
        inputs, what = self.inputs, self.measurement
        sizes: list[tuple[int, int | None]] = []
        coverage: list[dict[str, Any]] = []
        for c in range(len(self.manifest.models)):
            with load_checkpoint(inputs.model, inputs.checkpoints, c):
                decided = plan_coverage(inputs.model, inputs.task, rows, what.units, what.measure)
                coverage.append(decided.describe())
                if self.method.whitened and self.manifest.resolved.directions:  # passes as large as these
                    size, rows_per_pass = self.manifest.resolved.directions
                    sizes.append((size or 1, rows_per_pass))
                    continue
                task = task_at_step(inputs.task, self.method, c)
                sizes.append(choose_pass_size(inputs.model, task, rows, what, decided, memory))
        size, rows_per_pass = min(sizes, key=lambda s: s[0])
        size = size if batch_size is None else min(batch_size, len(rows))
        distinct = coverage[:1] if all(record == coverage[0] for record in coverage) else coverage
        resolved = replace(self.manifest.resolved, pass_size=size, rows=rows_per_pass, coverage=distinct)
        return replace(self.manifest, resolved=resolved)

    def with_method(
        self, method: Method, inputs: BuildInputs, memory: Callable[[Manifest], int]
    ) -> FeatureRunner:
        """A runner for another projection or measure: units, coverage and pass size are decided anew, within as many
        bytes as `memory` of its manifest."""
        m = self.manifest
        units = make_units(inputs.model, m.unit_names, str(method.projection), m.seed, self._matrices)
        manifest = replace(m, method=method.describe(), units=describe_units(units), factors=False)
        runner = FeatureRunner(self.folder, manifest, inputs)
        runner.units = units
        with exclusive(inputs.model):
            runner.manifest = runner.choose_passes(inputs.rows, memory(manifest))
        return runner


@dataclass
class _RowJobs:
    """Passes over rows under a checkpoint, which are jobs: of queries, or of the training examples `where`."""

    runner: FeatureRunner
    rows: Rows
    where: Sequence[int] | None = None
    patch: Patch = nullcontext
    results: Results | None = None  # of other processes

    @cached_property
    def passes(self) -> list[range]:
        return split_range(range(len(self.rows)), self.runner.manifest.resolved.pass_size)

    def close(self) -> None:
        self.runner.close()

    def describe(self, job: Job) -> str:
        here = self.passes[job[1]]
        return f"queries {here[0]} to {here[-1]} (checkpoint {job[0]})"

    def compute_pass(self, c: int, i: int) -> dict[str, Tensor]:
        """Features of pass i under checkpoint or step c."""
        here, inputs = self.passes[i], self.runner.inputs
        task = set_rows(inputs.task, self.runner.manifest.resolved.rows)
        what = "query" if self.where is None else "example"
        try:
            with raise_failing_example(
                inputs.model, task, self.rows, lambda: here, self.where, what, self.close
            ):
                run = self.runner.open_pass(c, self.patch, factors=False)
                [(at, batch, digests)] = self.rows.batches([here])
                if self.where is not None:
                    at = self.runner.sample_numbers([self.where[j] for j in at])
                [result] = run.over([(at, batch, digests)])
        except UndeError:
            raise
        except _FOREIGN as e:
            raise UndeError(
                f"the model cannot run on these queries ({type(e).__name__}: {e}): expected examples like those it was "
                "indexed on"
            ) from e
        return {
            "features": result.features,
            "values": result.values,
            "digest": to_signed_tensor(digests),
        }

    def write_pass(self, c: int, i: int) -> None:
        assert self.results is not None
        self.results.put((c, i), self.compute_pass(c, i))


def _check_finite(features: Tensor) -> None:
    for block in features:
        largest = torch.maximum(block.amax(1), -block.amin(1))  # NaN if one is; isfinite would copy all
        bad = (~largest.isfinite()).nonzero()[:, 0].tolist()
        if bad:
            raise BadQuery(bad[0], len(bad))


def task_at_step(task: Task, method: Method, c: int) -> Task:
    """The task at step c, for methods that keep the steps of a trajectory apart."""
    return task if method.steps == 1 else with_batching(task, task.batching.step(c, method.steps))


@contextmanager
def raise_failing_example(
    model: nn.Module,
    task: Task,
    rows: Rows,
    where: Callable[[], Iterable[int]],
    names: Sequence[object] | None = None,
    what: str = "example",
    close: Callable[[], None] = lambda: None,
) -> Generator[None]:
    """Replace an error inside the block by one that names the first example of `where` that fails by itself.

    `close` removes the hooks of a pass, before the model is run again.
    """
    try:
        yield
    except Exception as error:
        close()
        is_ours = isinstance(error, UndeError) and not isinstance(error, Unreadable)
        if is_ours or isinstance(error, torch.OutOfMemoryError) or not isinstance(error, _FOREIGN):
            raise
        failing = find_failing_example(model, task, rows, where())
        if failing is None:
            raise
        i, cause = failing
        name = i if names is None else names[i]
        if isinstance(cause, Unreadable):
            raise BadExample(f"{what} {name!r} {cause.what}") from None
        first_line = str(cause).strip().partition("\n")[0]
        advice = (
            "look at it, is it like the examples that the model was trained on, with a label that it knows?"
        )
        if "dtype" in first_line or "scalar type" in first_line:
            advice = "convert the data to the type of the model's parameters, such as x.float()"
        raise BadExample(
            f"the model cannot run on {what} {name!r} ({type(cause).__name__}: {first_line}): {advice}"
        ) from error


def raise_failing_sample(
    inputs: ModelInputs, names: Sequence[object] | None = None
) -> AbstractContextManager[None]:
    """The same for one of the training examples that a model is tried on first."""
    rows = inputs.rows
    assert rows is not None

    def where() -> list[int]:
        return sorted({*evenly(len(rows), EXAMPLES), largest(rows)})

    return raise_failing_example(inputs.model, inputs.task, rows, where, names)


def bad_gradient(bad: Sequence[object], way_out: str) -> BadExample:
    """An error for examples of a pass whose gradients are NaN or infinite."""
    more = f" (and of {len(bad) - 1} more in its batch)" if len(bad) > 1 else ""
    return BadExample(f"the gradient of example {bad[0]!r} is NaN or infinite{more}: {way_out}")


def find_failing_example(
    model: nn.Module, task: Task, rows: Rows, where: Iterable[int]
) -> tuple[int, Exception] | None:
    """The first example that the model fails on by itself, with its error."""
    device, _ = placement(model)
    for i in where:
        try:
            with torch.no_grad(), program_default():
                task.loss(model, to_device(rows.batch([i]), device))
        except _FOREIGN as e:
            return i, e
    return None
