"""Models trained on given subsets of the training data, kept in a folder so that an interrupted run resumes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unde.evaluate.arrays import Array
from unde.evaluate.bank.bank import describe_function
from unde.evaluate.bank.bank_io import UnfinishedBank
from unde.evaluate.bank.subsets import SubsetPlan
from unde.evaluate.bank.training import TrainJob, train_all
from unde.parallel import Executor, close_workers, get_executor
from unde.store.remote import StorePath, place


@dataclass(frozen=True, eq=False)
class ExplicitSubsets(SubsetPlan):
    """Subsets and training seeds as they are given, one of each for every model."""

    members: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.uint8))  # (S, N), packed along N
    model_seeds: Sequence[int] = ()

    @classmethod
    def of(cls, name: str, masks: Sequence[np.ndarray], seeds: Sequence[int], seed: int) -> ExplicitSubsets:
        packed = np.packbits(np.stack(masks), axis=1)
        digest = hashlib.sha256(packed.tobytes() + np.asarray(seeds, "<i8").tobytes()).hexdigest()[:16]
        return cls(
            f"{name}, subsets {digest}", len(masks[0]), len(masks), 0.5, seed, 1, None, packed, tuple(seeds)
        )

    @property
    def subset_size(self) -> int:
        """The smallest one."""
        return min(int(self.mask(s).sum()) for s in range(self.subsets))

    def mask(self, subset: int) -> np.ndarray:
        return np.unpackbits(self.members[subset], count=self.n_train).view(bool)

    def train_seed(self, subset: int, repeat: int) -> int:
        return int(self.model_seeds[subset])


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

    Args:
        train: As in `Bank.run`.
        utility: As in `Bank.run`.
        masks: (N,) bool of each model: the examples that it is trained on.
        seeds: Training seed of each model.
        path: Folder that results of models are kept in; None: a temporary one.
        name: What is trained; results of another name are refused.
        seed: Seed of `utility`.
        executor: Where models are trained.
        threads: Torch threads of each model.
        stacked: As in `Bank.run`.

    Returns:
        (S, Q) values of each named set of queries.
    """
    runner = get_executor(executor, threads=threads)
    name = name or f"{describe_function(train)}, {describe_function(utility)}"
    plan = ExplicitSubsets.of(name, masks, seeds, seed)
    with ExitStack() as stack:
        stack.enter_context(close_workers(executor, runner))
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if path is None else path
        at = place(folder)
        parts = UnfinishedBank(at.absolute() if isinstance(at, Path) else at)
        results = stack.enter_context(parts.fill(plan.config()))
        job = TrainJob(plan, train, utility, threads, results, stacked)
        # Models of one size together: they can be stacked.
        order = sorted(range(plan.models), key=lambda s: -int(plan.mask(s).sum()))
        models = train_all(job, runner, numbers=order)
    names = models[0].utility
    return {name: np.stack([models[s].utility[name] for s in range(plan.models)]) for name in names}
