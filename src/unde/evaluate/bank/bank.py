"""The retraining bank: models trained on random subsets, and how well each does on the queries."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unde.errors import UndeError
from unde.evaluate._arrays import Array
from unde.evaluate.bank.bank_io import PartsFolder, refuse_other_plan
from unde.evaluate.bank.finished import read_bank, write_bank
from unde.evaluate.bank.subsets import Plan
from unde.evaluate.bank.training import Train, train_all
from unde.evaluate.bank.training_spec import Training
from unde.parallel import Executor, ending, named
from unde.store.remote import StorePath, exists, place


@dataclass(frozen=True, eq=False, repr=False)
class Bank:
    """Models retrained on random subsets of the training data: what LDS compares predictions with.

    `masks` (S, N) says which examples each subset has; `utility[name]` (S, Q) how well its model does on
    the queries of that name, averaged over the seeds of the subset; `by_seed[name]` (S, R, Q) is the same
    before averaging. `seeds` and `seconds` are (S, R); `provenance` tells the plan and the machines.
    """

    path: StorePath
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
        path: str | os.PathLike[str] | StorePath,
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
        executor: str | Executor | None = None,
        threads: int = 1,
        name: str | None = None,
        stacked: int | None = None,
    ) -> Bank:
        """Trains a model on each of `subsets` random subsets and keeps how well it does on the queries.

        `train(indices, seed)` returns a model trained on those positions of the training data.
        `utility(model)` returns one number for each query, higher is better (such as −loss), or a dict of
        several named sets of queries; a set without a name is called "queries".

        Each subset holds a fraction `alpha` of the data, of each class if `stratify` gives the labels (N,).
        Subset s and its training seeds follow from (seed, s). Python, numpy and torch are seeded before each
        training, so that it does not matter in which order and in how many `processes` models are trained;
        before `utility` they are seeded alike for all models, so that queries meet the same noise. Each
        model has `threads` torch threads. `executor="processes:2"` is another way to say processes=2.

        The bank is the one file `path`, or object of a URL such as s3://bucket/bank.npz. While it is being
        filled, finished models are kept in `<path>.parts`: a run that was interrupted, even killed, goes on where
        it stopped if called again with the same arguments. `name` says what is trained, by default the names of
        the two functions; put in it what distinguishes this training from others, since a bank of another name
        is refused.

        With several processes `train` and `utility` must be functions of a module that can be imported.

        A `train` that is a `Training` says what a step is rather than doing it. Then a trial of a few steps settles how
        models are trained: by themselves, convolutions with channels last, products by oneDNN where it is quicker than
        the BLAS of torch, or several stacked as one (a multiple of the speed for very small models). All ways give the
        same weights up to rounding; models that draw inside their forward pass (dropout) and optimizers that do not
        step each number by itself are not stacked.
        `stacked` chooses instead: 1 for models by themselves, 8 for stacks of 8. A stack that is killed loses its own
        models only. `provenance` tells the way, and a run that goes on takes the way of the models that are there.

        >>> import tempfile, torch
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
        if stacked is not None and stacked < 1:
            raise UndeError(f"stacked is {stacked}: expected at least 1")
        if stacked is not None and stacked > 1 and not isinstance(train, Training):
            raise UndeError(
                f"stacked is {stacked}, but train is a function of one model: expected an unde.evaluate.Training, "
                "which says what a step is"
            )
        asked = executor or ("serial" if processes == 1 else f"processes:{processes}")
        runs = named(asked, threads=threads)
        name = name if name is not None else f"{describe_function(train)}, {describe_function(utility)}"
        plan = Plan(name, n_train, subsets, alpha, seed, seeds_per_subset, stratify)
        at = _absolute(place(path))
        folder = PartsFolder(at)
        if not exists(at):
            try:
                with ending(asked, runs), folder.held(plan.config()) as parts:
                    if not exists(at):  # else another run has finished it meanwhile
                        job = Train(plan, train, utility, threads, parts)
                        write_bank(at, plan, list(train_all(job, runs, stacked).values()))
            except UndeError:
                if isinstance(at, Path) or not exists(at):
                    raise  # else another run has finished it meanwhile, and cleared its parts
        bank = cls.open(at)
        refuse_other_plan(bank.provenance["plan"], plan.config(), at)
        folder.remove(plan.config())
        return bank

    @classmethod
    def open(cls, path: str | os.PathLike[str] | StorePath) -> Bank:
        """Reads a finished bank.

        >>> Bank.open("nowhere.npz")
        Traceback (most recent call last):
        unde.errors.UndeError: there is no bank at nowhere.npz: make one with Bank.run
        """
        at = place(path)
        if not exists(at):
            raise _not_there(at)
        found = read_bank(at)
        return cls(at, found.masks, found.by_seed, found.seeds, found.seconds, found.provenance)

    def __repr__(self) -> str:
        sets = ", ".join(f"{name} {values.shape}" for name, values in self.utility.items())
        size = f"{self.masks[0].sum()} of {self.masks.shape[1]} examples"
        return f"Bank({self.seeds.size} models on {size}; utility: {sets})"


def describe_function(function: Any) -> str:
    """A function by its name; the plain arguments of a partial are part of it."""
    if isinstance(function, functools.partial):
        given = [*map(_shown, function.args), *(f"{k}={_shown(v)}" for k, v in function.keywords.items())]
        return f"{describe_function(function.func)}({', '.join(given)})"
    if isinstance(function, Training):
        return f"Training({', '.join(f'{k}={_told(v)}' for k, v in function.settings().items())})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _told(value: Any) -> str:
    return describe_function(value) if callable(value) else _shown(value)


def _absolute(path: StorePath) -> StorePath:
    """From any working folder, as other processes may have another."""
    return path.absolute() if isinstance(path, Path) else path


def _shown(value: Any) -> str:
    plain = value is None or isinstance(value, (str, int, float, bool))
    return repr(value) if plain else type(value).__name__


def _not_there(path: StorePath) -> UndeError:
    folder = PartsFolder(path)
    if not folder.begun:
        return UndeError(f"there is no bank at {path}: make one with Bank.run")
    done, models = folder.progress()
    return UndeError(
        f"the bank {path} is not finished ({done} of {models} models): call Bank.run with the same arguments "
        "to go on"
    )
