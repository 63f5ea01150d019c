"""How the models of a bank are trained: each from its seed, in whatever process, and measured on the same queries."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from unde import console
from unde.errors import UndeError
from unde.evaluate._arrays import Array, finite, numbers
from unde.evaluate.bank.bank_io import Part, Parts
from unde.evaluate.bank.seeding import isolated_rng
from unde.evaluate.bank.stacked import Unstackable, train_stacked
from unde.evaluate.bank.subsets import Plan
from unde.evaluate.bank.training_spec import Training
from unde.evaluate.bank.ways import SIZES, Way, recorded, settled
from unde.gradients.feature_pass import threads
from unde.pages import keep_pages
from unde.parallel import Executor, Job, JobsFailed
from unde.version import __version__

UNNAMED = "queries"


class EnoughModels(Exception):
    """Raised by who watches a training: no more models are needed."""


@dataclass(frozen=True, eq=False)
class Train:
    """The job of one model, or of several that are trained as one: train, measure, write their parts."""

    plan: Plan
    train: Callable[[np.ndarray, int], Any]
    utility: Callable[[Any], Array | Mapping[str, Array]]
    threads: int
    parts: Parts
    way: Way | None = None  # of a training that is described
    asked: bool = False  # whether the caller has chosen the way
    wanted: int | None = None  # how many models are trained, if not all of the plan

    def __call__(self, *numbers: int) -> None:
        keep_pages()
        start = time.perf_counter()
        models, way = self._models(numbers)
        shared = (time.perf_counter() - start) / len(numbers)
        for number, model in zip(numbers, models, strict=True):
            start = time.perf_counter()
            with isolated_rng(self.plan.seed):
                measured = self.utility(model)
            try:
                values = _measured(measured)
            except UndeError as e:
                raise e if len(numbers) == 1 else UndeError(f"model {number}: {e}") from None
            seconds = shared + time.perf_counter() - start
            self.parts.write(number, Part(values, seconds, _environment(self.threads, way)))

    def which(self, number: int) -> tuple[np.ndarray, int]:
        """The examples and the seed of a model."""
        subset, repeat = divmod(number, self.plan.seeds_per_subset)
        return np.flatnonzero(self.plan.mask(subset)), self.plan.train_seed(subset, repeat)

    def _models(self, numbers: Sequence[int]) -> tuple[list[Any], Way | None]:
        which = [self.which(number) for number in numbers]
        if not isinstance(self.train, Training):
            (indices, seed) = which[0]
            with isolated_rng(seed):
                return [self.train(indices, seed)], None
        if len(which) > 1:
            try:
                return train_stacked(self.train, which), self.way
            except Unstackable as e:
                if self.asked:
                    raise UndeError(
                        f"the models cannot be trained as one ({e}): leave stacked= out, or pass stacked=1"
                    ) from e
        way = (
            self.way if self.way is not None and len(which) == 1 else Way()
        )  # the last may be a stack of one
        return [self.train.one(*one, way.channels_last, way.onednn) for one in which], way


def train_all(
    job: Train,
    executor: Executor,
    stacked: int | None = None,
    *,
    numbers: Sequence[int] | None = None,
    watch: Callable[[Mapping[int, Part]], str] | None = None,
) -> dict[int, Part]:
    """Train the models that are not there yet.

    Args:
        job: What is trained.
        executor: Who trains.
        stacked: How many models are trained as one; None tries it out.
        numbers: The models that are wanted, in the order of training; by default all of the plan.
        watch: Called with the parts of all finished models, before the first job and after each. The text that it
            returns stands beside the progress bar; `EnoughModels` ends the training.

    Returns:
        The parts by the numbers of their models, in ascending order.
    """
    plan = job.plan
    wanted = list(range(plan.models)) if numbers is None else list(numbers)
    job = job if numbers is None else replace(job, wanted=len(wanted))
    found: dict[int, Part] = {}
    missing = [number for number in wanted if not _collect(job.parts, number, found)]
    workers = getattr(executor, "count", None) or 1
    title = f"retraining on {plan.subset_size} of {plan.n_train} examples"
    size = 1
    if isinstance(job.train, Training) and missing:
        way = _way(job, missing, found, stacked, workers)
        job = replace(job, way=way, asked=stacked is not None)
        title, size = f"{title}, {way}", min(way.stacked, -(-len(missing) // workers))
    jobs: list[Job] = [tuple(missing[at : at + size]) for at in range(0, len(missing), size)]
    with (
        suppress(EnoughModels),
        console.progress(title, len(wanted), unit="models", done=len(found)) as advance,
    ):
        if watch is not None:
            watch(found)
        running = executor.run(_train_here if executor.here else _train, job, jobs)
        try:
            for done in running:
                for number in done:
                    if not _collect(job.parts, number, found):
                        raise UndeError(
                            f"{job.parts.file(number)} was written but cannot be read back: run again"
                        )
                    advance(1)
                if watch is not None:
                    advance(0, watch(found))
        except JobsFailed as failed:
            failing, reason = next(iter(failed.reasons.items()))
            raise _explained(job, failing, reason) from None
        finally:
            close = getattr(running, "close", None)
            if close is not None:
                close()
    return dict(sorted(found.items()))


def _way(
    job: Train, missing: Sequence[int], found: Mapping[int, Part], stacked: int | None, workers: int
) -> Way:
    """As asked for, else as models of this bank were trained before, else as a trial says."""
    assert isinstance(job.train, Training)
    if stacked is not None:
        return Way(stacked)
    before = next((way for part in found.values() if (way := recorded(part.environment))), None)
    if before is not None:
        return before
    keep_pages()
    try:
        with threads(job.threads):
            return settled(
                job.train, [job.which(number) for number in missing[: max(SIZES)]], len(missing), workers
            )
    except Exception as e:
        raise _explained(job, missing[:1], f"{type(e).__name__}: {e}") from e


def _train(job: Train, *numbers: int) -> None:
    with threads(job.threads):
        try:
            job(*numbers)
        except UndeError as e:
            raise _explained(job, numbers, str(e)) from e


def _train_here(job: Train, *numbers: int) -> None:
    """In this process, where nothing would be another time."""
    with threads(job.threads):
        try:
            job(*numbers)
        except Exception as e:
            raise _explained(job, numbers, f"{type(e).__name__}: {e}") from e


def _collect(parts: Parts, number: int, found: dict[int, Part]) -> bool:
    """Adds the model's part to `found`; False if there is none, or not a whole one."""
    part = parts.read(number)
    if part is None:
        return False
    first = next(iter(found.values()), part)
    if part.shapes() != first.shapes():
        raise UndeError(
            f"utility gave {part.shapes()} for model {number} and {first.shapes()} for another: it must "
            f"measure the same queries for each model. If it was changed meanwhile, delete {parts.path}"
        )
    found[number] = part
    return True


def _explained(job: Train, numbers: Sequence[int], reason: str) -> UndeError:
    plan = job.plan
    wanted = plan.models if job.wanted is None else job.wanted
    rest = (
        f"{job.parts.count()} of {wanted} models are kept in {job.parts.path}: run again to go on from there"
    )
    number = numbers[0]
    subset, repeat = divmod(number, plan.seeds_per_subset)
    which = f"model {number} (subset {subset}, seed {plan.train_seed(subset, repeat)})"
    if len(numbers) > 1:
        which = f"{which} or another of the {len(numbers)} that are trained with it"
    return UndeError(f"{which} failed: {reason}\n{rest}")


def _measured(measured: Array | Mapping[str, Array]) -> dict[str, np.ndarray]:
    sets = measured if isinstance(measured, Mapping) else {UNNAMED: measured}
    if not sets:
        raise UndeError("utility gave an empty dict: expected at least one named set of queries")
    return {name: _checked(name, value) for name, value in sets.items()}


def _checked(name: Any, value: Any) -> np.ndarray:
    if not isinstance(name, str):
        raise UndeError(f"utility named a set of queries {name!r}: names must be strings")
    values = numbers(value, f"utility[{name!r}]", "(Q,)").astype(np.float64)
    return finite(values, f"utility[{name!r}]", ("query",), "did the training diverge?")


def _environment(threads: int, way: Way | None = None) -> str:
    return json.dumps(
        {
            "unde": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "machine": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "threads_per_model": threads,
            **(way.as_json() if way is not None else {}),
        }
    )
