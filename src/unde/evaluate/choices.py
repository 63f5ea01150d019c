"""What a choice of training data is worth: a model is trained on it, and on as many random examples."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unde.data import to_numpy
from unde.errors import UndeError, require_positive, unknown
from unde.evaluate.arrays import Array
from unde.evaluate.bank.bank import train_subsets
from unde.evaluate.counterfactual import RANDOM, signed, two_way_estimate
from unde.evaluate.estimate import Estimate
from unde.parallel import Executor
from unde.store.remote import StorePath


@dataclass(frozen=True, eq=False, repr=False)
class ChoiceComparison:
    """Utilities of models trained on choices of data; `compare_choices` returns it.

    Attributes:
        utilities: {choice: {target: (Q, R)}} for each query and training seed.
        sizes: Examples of each choice.

    >>> ChoiceComparison({"random": {"mine": np.array([[-2.0]])}}, {"random": 60}).targets
    ['mine']
    """

    utilities: Mapping[str, Mapping[str, np.ndarray]]
    sizes: Mapping[str, int]

    @property
    def targets(self) -> list[str]:
        """Names of the sets of queries."""
        return list(self.utilities[RANDOM])

    def utility(self, choice: str, target: str) -> Estimate:
        """Of models trained on a choice, with its interval over queries and seeds."""
        return two_way_estimate(self._values(choice)[target])

    def gain(self, choice: str, target: str) -> Estimate:
        """The same less that of random examples, query by query and seed by seed."""
        return two_way_estimate(self._values(choice)[target] - self.utilities[RANDOM][target])

    def rows(self) -> list[list[str]]:
        """Cells of a table: choice, its examples, and for each target the loss and the gain over random."""
        out = []
        for choice, values in self.utilities.items():
            row = [choice, f"{self.sizes[choice]:,}"]
            for target in values:
                gain = "" if choice == RANDOM else signed(self.gain(choice, target))
                row += [f"{-self.utility(choice, target).mean:.4g}", gain]
            out.append(row)
        return out

    def as_dict(self) -> dict[str, Any]:
        """The summary, ready for JSON."""
        out: dict[str, Any] = {}
        for choice, values in self.utilities.items():
            out[choice] = {"examples": self.sizes[choice], "targets": {}}
            for target in values:
                cell = out[choice]["targets"][target] = {"utility": self.utility(choice, target).as_dict()}
                if choice != RANDOM:
                    cell["gain"] = self.gain(choice, target).as_dict()
        return out

    def __repr__(self) -> str:
        return f"ChoiceComparison({', '.join(self.utilities)} for {', '.join(self.targets)})"

    def _values(self, choice: str) -> Mapping[str, np.ndarray]:
        if choice not in self.utilities:
            raise unknown("choice", choice, self.utilities)
        return self.utilities[choice]


def compare_choices(
    choices: Mapping[str, Array],
    train: Callable[[np.ndarray, int], Any],
    utility: Callable[[Any], Array | Mapping[str, Array]],
    n_train: int,
    *,
    seeds: int = 3,
    path: str | os.PathLike[str] | StorePath | None = None,
    name: str | None = None,
    seed: int = 0,
    executor: str | Executor = "serial",
) -> ChoiceComparison:
    """Train on each choice of data, and on as many random examples as the first has, and measure the models.

    Args:
        choices: {name: positions of training examples}.
        train: Function of (indices, seed) that returns a model, or a `TrainingSpec`.
        utility: Function of a model that returns one number for each query, higher is better, or a dict of them for
            several targets. The queries must not be those that the choice was made for.
        n_train: Number of training examples to choose from.
        seeds: Trainings on each choice; each draws its own random examples.
        path: Folder that results are kept in: an interrupted run resumes.
        name: What is trained; results of another name are refused. Default: the names of the functions.
        seed: Of the random examples and all trainings.
        executor: Where models are trained.

    Returns:
        Utilities of each choice and of "random".

    Raises:
        UndeError: A choice is empty or names examples that are not there, or a training failed.

    Example:
        >>> import torch
        >>> data = torch.linspace(0, 1, 20)
        >>> result = compare_choices(
        ...     {"upper half": range(10, 20)},
        ...     train=lambda indices, seed: data[indices].mean(),
        ...     utility=lambda model: -(model - torch.tensor([0.7, 0.8])).abs(),
        ...     n_train=20,
        ... )
        >>> result.gain("upper half", "queries").mean > 0.1
        True
    """
    require_positive(seeds=seeds)
    training_seeds = np.random.SeedSequence(seed).generate_state(seeds, np.uint32).tolist()
    positions = {str(n): _check_choice(str(n), choice, n_train) for n, choice in choices.items()}
    if not positions or RANDOM in positions:
        raise UndeError(
            f"choices names {', '.join(positions) or 'nothing'}: expected choices of other names than {RANDOM!r}"
        )
    count = len(next(iter(positions.values())))
    draws = [np.random.default_rng([seed, r]).permutation(n_train)[:count] for r in range(seeds)]
    lists = {RANDOM: draws} | {choice: [at] * seeds for choice, at in positions.items()}
    masks = [np.isin(np.arange(n_train), at) for of_choice in lists.values() for at in of_choice]
    measured = train_subsets(
        train, utility, masks, training_seeds * len(lists), path=path, name=name, seed=seed, executor=executor
    )
    utilities = {
        choice: {target: u[c * seeds : (c + 1) * seeds].T for target, u in measured.items()}
        for c, choice in enumerate(lists)
    }
    return ChoiceComparison(utilities, {choice: len(of_choice[0]) for choice, of_choice in lists.items()})


def _check_choice(name: str, choice: Any, n_train: int) -> np.ndarray:
    at = to_numpy(choice if hasattr(choice, "shape") else np.asarray(list(choice))).reshape(-1)
    if not len(at) or at.dtype.kind not in "iu" or at.min() < 0 or at.max() >= n_train:
        raise UndeError(
            f"choice {name!r} must list examples by position, from 0 to {n_train - 1} and at least one"
        )
    return at
