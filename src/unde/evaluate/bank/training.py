"""How the models of a bank are trained: each from its seed, in whatever process, and measured on the same queries."""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unde import console
from unde.errors import UndeError
from unde.evaluate._arrays import Array, finite, numbers
from unde.evaluate.bank.files import Part, Parts
from unde.evaluate.bank.subsets import Plan
from unde.execution import Executor, Job, JobsFailed
from unde.features.run import threads
from unde.version import __version__

UNNAMED = "queries"


@dataclass(frozen=True, eq=False)
class Train:
    """The job of one model: train, measure, write its part."""

    plan: Plan
    train: Callable[[np.ndarray, int], Any]
    utility: Callable[[Any], Array | Mapping[str, Array]]
    threads: int
    parts: Parts

    def __call__(self, number: int) -> None:
        subset, repeat = divmod(number, self.plan.seeds_per_subset)
        indices, seed = np.flatnonzero(self.plan.mask(subset)), self.plan.train_seed(subset, repeat)
        start = time.perf_counter()
        with _random_state_restored():
            _seed_all(seed)
            model = self.train(indices, seed)
            _seed_all(self.plan.seed)
            measured = self.utility(model)
        sets = measured if isinstance(measured, Mapping) else {UNNAMED: measured}
        if not sets:
            raise UndeError("utility gave an empty dict: expected at least one named set of queries")
        values = {name: _checked(name, value) for name, value in sets.items()}
        seconds = time.perf_counter() - start
        self.parts.write(number, Part(values, seconds, _environment(self.threads)))


def train_all(job: Train, executor: Executor) -> list[Part]:
    """Trains what is not there yet; the parts of all models, in order."""
    plan = job.plan
    found: dict[int, Part] = {}
    missing: list[Job] = [
        (number,) for number in range(plan.models) if not _collect(job.parts, number, found)
    ]
    title = f"retraining on {plan.subset_size} of {plan.n_train} examples"
    with console.progress(title, plan.models, unit="models", done=len(found)) as advance:
        try:
            for (number,) in executor.run(_train_here if executor.here else _train, job, missing):
                if not _collect(job.parts, number, found):
                    raise UndeError(
                        f"{job.parts.file(number)} was written but cannot be read back: run again"
                    )
                advance(1)
        except JobsFailed as failed:
            (number,), reason = next(iter(failed.reasons.items()))
            raise _explained(job, number, reason) from None
    return [found[number] for number in range(plan.models)]


def _train(job: Train, number: int) -> None:
    with threads(job.threads):
        try:
            job(number)
        except UndeError as e:
            raise _explained(job, number, str(e)) from e


def _train_here(job: Train, number: int) -> None:
    """In this process, where nothing would be another time."""
    with threads(job.threads):
        try:
            job(number)
        except Exception as e:
            raise _explained(job, number, f"{type(e).__name__}: {e}") from e


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


def _explained(job: Train, number: int, reason: str) -> UndeError:
    plan = job.plan
    rest = f"{job.parts.count()} of {plan.models} models are kept in {job.parts.path}: run again to go on from there"
    subset, repeat = divmod(number, plan.seeds_per_subset)
    which = f"model {number} (subset {subset}, seed {plan.train_seed(subset, repeat)})"
    return UndeError(f"{which} failed: {reason}\n{rest}")


def _checked(name: Any, value: Any) -> np.ndarray:
    if not isinstance(name, str):
        raise UndeError(f"utility named a set of queries {name!r}: names must be strings")
    values = numbers(value, f"utility[{name!r}]", "(Q,)").astype(np.float64)
    return finite(values, f"utility[{name!r}]", ("query",), "did the training diverge?")


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def _random_state_restored() -> Generator[None, None, None]:
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def _environment(threads: int) -> str:
    return json.dumps(
        {
            "unde": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "machine": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "threads_per_model": threads,
        }
    )
