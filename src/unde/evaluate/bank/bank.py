"""Retraining banks: models trained on random subsets, and how well each does on the queries."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from unde.default_device import host_default
from unde.errors import UndeError, require_positive
from unde.evaluate.arrays import Array
from unde.evaluate.bank.bank_io import UnfinishedBank, read_bank, refuse_other_plan, write_bank
from unde.evaluate.bank.subsets import ExplicitSubsets, SubsetPlan
from unde.evaluate.bank.training import TrainJob, train_all
from unde.evaluate.bank.training_spec import TrainingSpec
from unde.parallel import Executor, close_workers, get_executor
from unde.store.remote import StorePath, exists, is_local, place


@dataclass(frozen=True, eq=False, repr=False)
class Bank:
    """Models retrained on random subsets of the training data, the ground truth of `lds`.

    Attributes:
        path: The file or URL.
        masks: (S, N) bool, the examples of each subset.
        by_seed: (S, R, Q) utility of each model, for each named set of queries.
        seeds: (S, R) training seeds.
        seconds: (S, R) time of training and measuring.
        provenance: The plan, and the environments that models were trained in.
    """

    path: StorePath
    masks: np.ndarray
    by_seed: dict[str, np.ndarray]
    seeds: np.ndarray
    seconds: np.ndarray
    provenance: dict[str, Any]

    @property
    def utility(self) -> dict[str, np.ndarray]:
        """(S, Q) utility of each subset, averaged over seeds, for each named set of queries; higher is better."""
        return {name: values.mean(axis=1) for name, values in self.by_seed.items()}

    @classmethod
    @host_default
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
        """Train a model on each of `subsets` random subsets and measure it on the queries.

        Finished models are kept in `<path>.parts` until the bank is complete: a run that was interrupted or killed
        continues when it is called again with the same arguments. Python, numpy and torch are seeded before each
        training, and before `utility` alike for all models, so results do not depend on the order of training or the
        number of processes.

        Args:
            path: File, or URL such as s3://bucket/bank.npz.
            train: Function of (indices, seed) that returns a model trained on these positions of the training data; or
                a `TrainingSpec`. With several processes it must be importable, and so must `utility`.
            utility: Function of a model that returns one number for each query, higher is better (such as −loss), or a
                dict of named sets of queries. The default name of a set is "queries".
            n_train: Number of training examples.
            subsets: Number of subsets.
            alpha: Fraction of the examples in a subset.
            seed: Seed of the subsets and of all trainings.
            stratify: (N,) labels; every subset then holds the fraction `alpha` of each class.
            seeds_per_subset: Models trained on each subset.
            processes: Number of processes; the same as `executor="processes:<n>"`.
            executor: Where models are trained, in place of `processes`.
            threads: Torch threads of each model.
            name: What is trained; a bank of another name is refused. Default: the names of both functions.
            stacked: Models of a `TrainingSpec` that are trained together with `torch.func.vmap`; 1 for a plain loop.
                Weights agree up to rounding. Default: 32 for models of at most 32,768 parameters without convolutions
                (several times as fast) where `vmap` can run them, else 1.

        Returns:
            The finished bank.

        Raises:
            UndeError: A training failed, `path` holds another bank, or an argument is out of range.

        Example:
            >>> import tempfile, torch
            >>> from pathlib import Path
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
        require_positive(processes=processes, threads=threads, stacked=stacked)
        if stacked is not None and stacked > 1 and not isinstance(train, TrainingSpec):
            raise UndeError(
                f"stacked is {stacked}, but train is a function of one model: expected an unde.evaluate.TrainingSpec"
            )
        executor = executor or ("serial" if processes == 1 else f"processes:{processes}")
        runner = get_executor(executor, threads=threads)
        name = name if name is not None else f"{describe_function(train)}, {describe_function(utility)}"
        plan = SubsetPlan(name, n_train, subsets, alpha, seed, seeds_per_subset, stratify)
        file = place(path)
        file = file.absolute() if is_local(file) else file  # workers may have another working folder
        folder = UnfinishedBank.of(file)
        if not exists(file):
            try:
                with close_workers(executor, runner), folder.fill(plan.config()) as results:
                    if not exists(file):  # else another run has finished it meanwhile
                        job = TrainJob(plan, train, utility, threads, results, stacked)
                        write_bank(file, plan, list(train_all(job, runner).values()))
            except UndeError:
                if is_local(file) or not exists(file):
                    raise  # else another run has finished it meanwhile, and removed the folder
        bank = cls.open(file)
        refuse_other_plan(bank.provenance["plan"], plan.config(), file)
        folder.remove(plan.config())
        return bank

    @classmethod
    def open(cls, path: str | os.PathLike[str] | StorePath) -> Bank:
        """Read a finished bank.

        >>> Bank.open("nowhere.npz")
        Traceback (most recent call last):
        unde.errors.UndeError: there is no bank at nowhere.npz: make one with Bank.run
        """
        file = place(path)
        folder = UnfinishedBank.of(file)
        if exists(file):
            return cls(file, **read_bank(file))
        if not folder.exists():
            raise UndeError(f"there is no bank at {file}: make one with Bank.run")
        results, plan = folder.open()
        raise UndeError(
            f"the bank {file} is not finished ({len(results.files())} of {plan.models} models): call Bank.run with the "
            "same arguments to go on"
        )

    def __repr__(self) -> str:
        sets = ", ".join(f"{name} {values.shape}" for name, values in self.utility.items())
        size = f"{self.masks[0].sum()} of {self.masks.shape[1]} examples"
        return f"Bank({self.seeds.size} models on {size}; utility: {sets})"


def describe_function(function: Any) -> str:
    """Name of a function with the plain arguments of a partial, or of a training with its settings."""
    if isinstance(function, functools.partial):
        keywords = (f"{name}={_describe_value(v)}" for name, v in function.keywords.items())
        arguments = [*map(_describe_value, function.args), *keywords]
        return f"{describe_function(function.func)}({', '.join(arguments)})"
    if isinstance(function, TrainingSpec):
        settings = (
            f"{name}={describe_function(v) if callable(v) else _describe_value(v)}"
            for name, v in function.settings().items()
        )
        return f"Training({', '.join(settings)})"  # part of the names of existing banks
    function = function if hasattr(function, "__qualname__") else type(function)
    return f"{function.__module__}.{function.__qualname__}"


def _describe_value(value: Any) -> str:
    plain = value is None or isinstance(value, (str, int, float, bool))
    return repr(value) if plain else type(value).__name__


# --- other subsets ------------------------------------------------------------------------------------------


def train_subsets(
    train: Callable[[np.ndarray, int], Any],
    utility: Callable[[Any], Array | Mapping[str, Array]],
    masks: Sequence[np.ndarray],
    seeds: Sequence[int],
    *,
    path: str | os.PathLike[str] | StorePath | None = None,
    name: str | None = None,
    seed: int = 0,
    executor: str | Executor = "serial",
    threads: int = 1,
    stacked: int | None = None,
) -> dict[str, np.ndarray]:
    """Train a model on each subset and measure it.

    Arguments are those of `Bank.run`, but for the `masks` (N,) bool and training `seeds` of each model, and for `path`,
    a folder that results of models are kept in, one inside for each list of subsets (None: a temporary one). Returns
    (S, Q) values of each named set of queries.
    """
    runner = get_executor(executor, threads=threads)
    name = name or f"{describe_function(train)}, {describe_function(utility)}"
    plan = ExplicitSubsets.of(name, masks, seeds, seed)
    with ExitStack() as stack:
        stack.enter_context(close_workers(executor, runner))
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if path is None else path
        at = place(folder)
        parts = UnfinishedBank((at.absolute() if is_local(at) else at) / plan.digest)
        results = stack.enter_context(parts.fill(plan.config()))
        job = TrainJob(plan, train, utility, threads, results, stacked)
        # Models of one size together: they can be stacked.
        order = sorted(range(plan.models), key=lambda s: -int(plan.mask(s).sum()))
        models = train_all(job, runner, numbers=order)
    names = models[0].utility
    return {name: np.stack([models[s].utility[name] for s in range(plan.models)]) for name in names}
