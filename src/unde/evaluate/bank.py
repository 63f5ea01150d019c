"""The retraining bank: models trained on random subsets, and how well each does on the queries."""

from __future__ import annotations

import functools
import json
import os
import platform
import random
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unde import console
from unde.errors import UndeError
from unde.evaluate._arrays import Array, finite, numbers
from unde.evaluate.bank_files import (
    FORMAT,
    FORMATS,
    UNREADABLE,
    Part,
    PartsFolder,
    environments,
    read_arrays,
    refuse_other_plan,
    sets_in,
    write_arrays,
)
from unde.evaluate.subsets import Plan
from unde.evaluate.workers import JobFailed, finished

UNNAMED = "queries"


@dataclass(frozen=True, eq=False, repr=False)
class Bank:
    """Models retrained on random subsets of the training data: what LDS compares predictions with.

    `masks` (S, N) says which examples each subset has; `utility[name]` (S, Q) how well its model does on
    the queries of that name, averaged over the seeds of the subset; `by_seed[name]` (S, R, Q) is the same
    before averaging. `seeds` and `seconds` are (S, R); `provenance` tells the plan and the machines.
    """

    path: Path
    masks: np.ndarray
    by_seed: dict[str, np.ndarray]
    seeds: np.ndarray
    seconds: np.ndarray
    provenance: dict[str, Any]

    @property
    def utility(self) -> dict[str, np.ndarray]:
        """For each set of queries, (S, Q), higher is better."""
        return {name: values.mean(axis=1) for name, values in self.by_seed.items()}

    @classmethod
    def run(
        cls,
        path: str | os.PathLike[str],
        *,
        train: Callable[[np.ndarray, int], Any],
        utility: Callable[[Any], Array | Mapping[str, Array]],
        n_train: int,
        subsets: int = 64,
        alpha: float = 0.5,
        seed: int = 0,
        stratify: Array | None = None,
        seeds_per_subset: int = 1,
        processes: int = 1,
        threads: int = 1,
        name: str | None = None,
    ) -> Bank:
        """Trains a model on each of `subsets` random subsets and keeps how well it does on the queries.

        `train(indices, seed)` returns a model trained on those positions of the training data.
        `utility(model)` returns one number for each query, higher is better (such as −loss), or a dict of
        several named sets of queries; a set without a name is called "queries".

        Each subset holds a fraction `alpha` of the data, of each class if `stratify` gives the labels (N,).
        Subset s and its training seeds follow from (seed, s). Python, numpy and torch are seeded before each
        training, so that it does not matter in which order and in how many `processes` models are trained;
        before `utility` they are seeded alike for all models, so that queries meet the same noise. Each
        model has `threads` torch threads.

        The bank is the one file `path`. While it is being filled, finished models are kept in
        `<path>.parts`: a run that was interrupted, even killed, goes on where it stopped if called again
        with the same arguments. `name` says what is trained, by default the names of the two functions; put
        in it what distinguishes this training from others, since a bank of another name is refused.

        With several processes `train` and `utility` must be functions of a module that can be imported.

        >>> import tempfile
        >>> data = torch.linspace(0, 1, 20)
        >>> bank = Bank.run(
        ...     Path(tempfile.mkdtemp()) / "bank.npz",
        ...     train=lambda indices, seed: data[indices].mean(),
        ...     utility=lambda model: -((model - torch.tensor([0.1, 0.9])) ** 2),
        ...     n_train=20, subsets=8,
        ... )
        >>> bank.masks.shape, bank.utility["queries"].shape
        ((8, 20), (8, 2))
        """
        for what, value in (("processes", processes), ("threads", threads)):
            if value < 1:
                raise UndeError(f"{what} is {value}: expected at least 1")
        name = name if name is not None else f"{_called(train)}, {_called(utility)}"
        plan = Plan(name, n_train, subsets, alpha, seed, seeds_per_subset, stratify)
        path = Path(path).absolute()
        folder = PartsFolder(path)
        if path.exists():
            bank = cls.open(path)
            refuse_other_plan(bank.provenance["plan"], plan.config(), path)
        else:
            folder.open(plan.config())
            with folder.locked():
                parts = _train_all(_Train(plan, train, utility, threads, folder), processes)
                _write_bank(path, plan, parts)
            bank = cls.open(path)
        folder.remove(plan.config())
        return bank

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bank:
        """Reads a finished bank.

        >>> Bank.open("nowhere.npz")
        Traceback (most recent call last):
        unde.errors.UndeError: there is no bank at nowhere.npz: make one with Bank.run
        """
        path = Path(path)
        if not path.exists():
            raise _not_there(path)
        try:
            arrays = read_arrays(path)
            provenance = json.loads(str(arrays["provenance"]))
            if provenance["format"] not in FORMATS:
                raise KeyError(f"format {provenance['format']!r} instead of {FORMAT!r}")
            count = int(provenance["plan"]["n_train"])
            masks = np.unpackbits(arrays["masks"], axis=1, count=count).astype(bool)
            return cls(path, masks, sets_in(arrays), arrays["seeds"], arrays["seconds"], provenance)
        except UNREADABLE as error:
            raise UndeError(
                f"{path} is not a bank that can be read, or is damaged ({error}): choose another path, or "
                "delete it and make it anew with Bank.run"
            ) from error

    def __repr__(self) -> str:
        sets = ", ".join(f"{name} {values.shape}" for name, values in self.utility.items())
        size = f"{self.masks[0].sum()} of {self.masks.shape[1]} examples"
        return f"Bank({self.seeds.size} models on {size}; utility: {sets})"


@dataclass(frozen=True, eq=False)
class _Train:
    """The job of one model: train, measure, write its part."""

    plan: Plan
    train: Callable[[np.ndarray, int], Any]
    utility: Callable[[Any], Array | Mapping[str, Array]]
    threads: int
    folder: PartsFolder

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
        self.folder.write(number, Part(values, seconds, _environment(self.threads)))


def _train_all(job: _Train, processes: int) -> list[Part]:
    """Trains what is not there yet; the parts of all models, in order."""
    plan, folder = job.plan, job.folder
    parts: dict[int, Part] = {}
    missing = [number for number in range(plan.models) if not _collect(folder, number, parts)]
    title = f"retraining on {plan.subset_size} of {plan.n_train} examples"
    done = closing(finished(job, missing, processes, job.threads))
    shown = console.progress(title, plan.models, unit="models", done=len(parts))
    with shown as advance, done as numbers_done:
        try:
            for number in numbers_done:
                if not _collect(folder, number, parts):
                    raise UndeError(f"{folder.file(number)} was written but cannot be read back")
                advance(1)
        except JobFailed as failure:
            raise _explained(failure, plan, folder) from failure.__cause__
    return [parts[number] for number in range(plan.models)]


def _collect(folder: PartsFolder, number: int, parts: dict[int, Part]) -> bool:
    """Adds the model's part to `parts`; False if there is none, or not a whole one."""
    part = folder.read(number)
    if part is None:
        return False
    first = next(iter(parts.values()), part)
    if part.shapes() != first.shapes():
        raise UndeError(
            f"utility gave {part.shapes()} for model {number} and {first.shapes()} for another: it must "
            f"measure the same queries for each model. If it was changed meanwhile, delete {folder.path}"
        )
    parts[number] = part
    return True


def _explained(failure: JobFailed, plan: Plan, folder: PartsFolder) -> UndeError:
    kept = sum(folder.file(number).exists() for number in range(plan.models))
    rest = f"{kept} of {plan.models} models are kept in {folder.path}: run again to go on from there"
    if failure.number is None:
        return UndeError(f"{failure.reason}.\n{rest}")
    subset, repeat = divmod(failure.number, plan.seeds_per_subset)
    which = f"model {failure.number} (subset {subset}, seed {plan.train_seed(subset, repeat)})"
    return UndeError(f"{which} failed: {failure.reason}\n{rest}")


def _write_bank(path: Path, plan: Plan, parts: list[Part]) -> None:
    grid = (plan.subsets, plan.seeds_per_subset)
    seeds = [plan.train_seed(*divmod(number, plan.seeds_per_subset)) for number in range(plan.models)]
    provenance = {
        "format": FORMAT,
        "plan": plan.config(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environments": environments(parts),
    }
    arrays = {
        "masks": np.packbits(plan.masks(), axis=1),
        "seeds": np.array(seeds, dtype=np.int64).reshape(grid),
        "seconds": np.array([part.seconds for part in parts]).reshape(grid),
        "provenance": np.array(json.dumps(provenance)),
    }
    for name in parts[0].utility:
        arrays[f"utility/{name}"] = np.stack([part.utility[name] for part in parts]).reshape(*grid, -1)
    write_arrays(path, arrays)


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
            "unde": version("unde"),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "machine": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "threads_per_model": threads,
        }
    )


def _called(function: Any) -> str:
    """A function by its name; the plain arguments of a partial are part of it."""
    if isinstance(function, functools.partial):
        given = [*map(_shown, function.args), *(f"{k}={_shown(v)}" for k, v in function.keywords.items())]
        return f"{_called(function.func)}({', '.join(given)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _shown(value: Any) -> str:
    plain = value is None or isinstance(value, (str, int, float, bool))
    return repr(value) if plain else type(value).__name__


def _not_there(path: Path) -> UndeError:
    folder = PartsFolder(path)
    if not folder.path.exists():
        return UndeError(f"there is no bank at {path}: make one with Bank.run")
    models = folder.config()["subsets"] * folder.config()["seeds_per_subset"]
    done = sum(folder.file(number).exists() for number in range(models))
    return UndeError(
        f"the bank {path} is not finished ({done} of {models} models): call Bank.run with the same arguments "
        "to go on"
    )
