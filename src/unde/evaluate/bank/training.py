"""Train the models of a bank, each from its seed and in any process, and measure them on the same queries."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import console
from unde.data import Rows, choose_collate, to_device
from unde.default_device import program_default
from unde.devices import device_of
from unde.errors import UndeError
from unde.evaluate.arrays import Array, finite, numbers
from unde.evaluate.bank.bank_io import ModelResult, UnfinishedBank
from unde.evaluate.bank.stacked import Unstackable, default_stack, train_stacked
from unde.evaluate.bank.subsets import SubsetPlan
from unde.evaluate.bank.training_spec import TrainingSpec, isolated_rng
from unde.gradients.feature_pass import torch_threads
from unde.gradients.model_state import frozen_eval
from unde.parallel import Executor, Job, JobsFailed
from unde.tasks import Task
from unde.version import __version__

UNNAMED = "queries"


class EnoughModels(Exception):
    """Raised by the `watch` of `train_all` to end the training."""


@dataclass(frozen=True, eq=False)
class TrainJob:
    """Train, measure and write one model, or several that are trained as one."""

    plan: SubsetPlan
    train: Callable[[np.ndarray, int], Any]
    utility: Callable[[Any], Array | Mapping[str, Array]]
    threads: int
    results: UnfinishedBank
    stacked: int | None = None  # models trained as one; None: stacks that fail are trained one by one
    models: int | None = None  # how many are trained, if not all of the plan

    def __call__(self, *numbers: int) -> None:
        start = time.perf_counter()
        models, settings = self._train(numbers)
        training_seconds = (time.perf_counter() - start) / len(numbers)
        for number, model in zip(numbers, models, strict=True):
            start = time.perf_counter()
            with isolated_rng(self.plan.seed):
                utility = self.utility(model)
            try:
                values = check_utility(utility)
            except UndeError as e:
                raise e if len(numbers) == 1 else UndeError(f"model {number}: {e}") from None
            seconds = training_seconds + time.perf_counter() - start
            self.results.write(number, ModelResult(values, seconds, self._environment(settings)))

    def assignment(self, number: int) -> tuple[np.ndarray, int]:
        """The examples and the seed of a model."""
        subset, repeat = divmod(number, self.plan.seeds_per_subset)
        return np.flatnonzero(self.plan.mask(subset)), self.plan.train_seed(subset, repeat)

    def _train(self, numbers: Sequence[int]) -> tuple[list[Any], dict[str, Any]]:
        """The models, and the settings of a described training."""
        assignments = [self.assignment(number) for number in numbers]
        if not isinstance(self.train, TrainingSpec):
            ((indices, seed),) = assignments
            with isolated_rng(seed):
                return [self.train(indices, seed)], {}
        if len(assignments) > 1:
            try:
                models = train_stacked(self.train, assignments)
                return models, {"stacked": len(models), "channels_last": False}
            except Unstackable as e:
                if self.stacked is not None:
                    raise UndeError(
                        f"the models cannot be trained as one ({e}): leave stacked= out, or pass stacked=1"
                    ) from e
        models = [self.train(*assignment) for assignment in assignments]
        return models, {"stacked": 1, "channels_last": self.train.channels_last}

    def _environment(self, settings: Mapping[str, Any]) -> str:
        return json.dumps(
            {
                "unde": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "torch": torch.__version__,
                "machine": f"{platform.system()} {platform.machine()}",
                "cpus": os.cpu_count(),
                "threads_per_model": self.threads,
                **settings,
            }
        )

    def failure(self, numbers: Sequence[int], reason: str) -> UndeError:
        subset, repeat = divmod(numbers[0], self.plan.seeds_per_subset)
        which = f"model {numbers[0]} (subset {subset}, seed {self.plan.train_seed(subset, repeat)})"
        if len(numbers) > 1:
            which = f"{which} or another of the {len(numbers)} that are trained with it"
        return UndeError(
            f"{which} failed: {reason}\n{len(self.results.files())} of {self.models or self.plan.models} models are "
            f"kept in {self.results.path}: run again to go on from there"
        )


def train_all(
    job: TrainJob,
    executor: Executor,
    *,
    numbers: Sequence[int] | None = None,
    watch: Callable[[Mapping[int, ModelResult]], str] | None = None,
) -> dict[int, ModelResult]:
    """Train the models `numbers`, by default all, that have no result yet; returns results by number, ascending.

    `watch` is called with all results, before the first job and after each. The text that it returns is shown beside
    the progress bar; `EnoughModels` ends the training.
    """
    plan = job.plan
    numbers = list(range(plan.models)) if numbers is None else list(numbers)
    job = replace(job, models=len(numbers))
    results: dict[int, ModelResult] = {}
    missing = [number for number in numbers if not _collect(job.results, number, results)]
    size = _stack_size(job, missing, executor)
    jobs: list[Job] = [tuple(missing[at : at + size]) for at in range(0, len(missing), size)]
    title = f"retraining on {plan.subset_size} of {plan.n_train} examples"
    title = f"{title}, {size} models at a time" if size > 1 else title
    with (
        suppress(EnoughModels),
        console.progress(title, len(numbers), unit="models", done=len(results)) as advance,
    ):
        if watch is not None:
            watch(results)
        # In workers, errors of the user's functions alone are explained: the executor tries others again.
        explained = Exception if executor.in_process else UndeError
        running = executor.run(partial(_train, explained=explained), job, jobs)
        try:
            for done in running:
                for number in done:
                    if not _collect(job.results, number, results):
                        raise UndeError(
                            f"{job.results.file(number)} was written but cannot be read back: run again"
                        )
                    advance(1)
                if watch is not None:
                    advance(0, watch(results))
        except JobsFailed as failed:
            failing, reason = next(iter(failed.reasons.items()))
            raise job.failure(failing, reason) from None
        finally:
            close = getattr(running, "close", None)
            if close is not None:
                close()
    return dict(sorted(results.items()))


def _stack_size(job: TrainJob, missing: Sequence[int], executor: Executor) -> int:
    """Models in a job: as many as asked for, at least one job for each worker."""
    if not isinstance(job.train, TrainingSpec) or not missing:
        return 1
    stacked = job.stacked
    if stacked is None:
        _, seed = job.assignment(missing[0])
        try:
            stacked = default_stack(job.train, seed)
        except Exception as e:
            raise job.failure(missing[:1], f"{type(e).__name__}: {e}") from e
    return min(stacked, -(-len(missing) // (getattr(executor, "count", None) or 1)))


def _train(job: TrainJob, *numbers: int, explained: type[Exception]) -> None:
    with torch_threads(job.threads):
        try:
            job(*numbers)
        except explained as e:
            reason = str(e) if isinstance(e, UndeError) else f"{type(e).__name__}: {e}"
            raise job.failure(numbers, reason) from e


def _collect(folder: UnfinishedBank, number: int, results: dict[int, ModelResult]) -> bool:
    """Add the result of a model to `results`; False if there is none."""
    result = folder.read(number)
    if result is None:
        return False
    first = next(iter(results.values()), result)
    if result.shapes() != first.shapes():
        raise UndeError(
            f"utility gave {result.shapes()} for model {number} and {first.shapes()} for another: it must "
            f"measure the same queries for each model. If it was changed meanwhile, delete {folder.path}"
        )
    results[number] = result
    return True


def check_utility(utility: Array | Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Finite (Q,) utilities of each named set of queries."""
    sets = utility if isinstance(utility, Mapping) else {UNNAMED: utility}
    if not sets or not all(isinstance(name, str) for name in sets):
        raise UndeError(
            f"utility gave a dict of {list(sets)}: expected at least one named set of queries; names must be strings"
        )
    out = {}
    for name, value in sets.items():
        values = numbers(value, f"utility[{name!r}]", "(Q,)").astype(np.float64)
        out[name] = finite(values, f"utility[{name!r}]", ("query",), "did the training diverge?")
    return out


BATCH = 32  # queries that go through a model at once


@dataclass(frozen=True, eq=False)
class QueryUtility:
    """How well a model does on queries: −loss, one number for each.

    Args:
        task: The task of the model.
        rows: The queries; data like the training data.

    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
    >>> from unde.tasks import Classification
    >>> QueryUtility(Classification(), (x, y))(nn.Linear(2, 2)).shape
    torch.Size([2])
    """

    task: Task
    rows: Any

    def __post_init__(self) -> None:
        if not isinstance(self.rows, Rows):
            object.__setattr__(self, "rows", Rows(self.rows, choose_collate(self.task.collate, self.rows)))

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Tensor:
        device = device_of(model)
        cuts = [range(a, min(a + BATCH, len(self.rows))) for a in range(0, len(self.rows), BATCH)]
        with frozen_eval(model), program_default():
            parts = [self.task.loss(model, to_device(self.rows.batch(c), device)) for c in cuts]
        return -torch.cat(parts).cpu().double()


@dataclass(frozen=True, eq=False)
class TargetUtility:
    """The same for several named sets of queries.

    Args:
        task: The task of the model.
        targets: {name: queries}.

    >>> from unde.tasks import Classification
    >>> measure = TargetUtility(Classification(), {"mine": (torch.zeros(1, 2), torch.zeros(1).long())})
    >>> measure(nn.Linear(2, 3))["mine"].shape
    torch.Size([1])
    """

    task: Task
    targets: Mapping[str, Any]

    def __call__(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: QueryUtility(self.task, rows)(model) for name, rows in self.targets.items()}
