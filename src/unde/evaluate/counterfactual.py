"""Counterfactuals: what happens to queries when the model is trained on other data.

    drop(q, k) = U(q; all) − U(q; all without the top k of q),    U higher is better, such as −loss

beside the drop for k random examples. A drop is a mean over training seeds; a model without examples and the one with
all of them have the same seed. A choice of training data is compared with as many random examples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unde.data import to_numpy
from unde.errors import UndeError, require_positive, unknown
from unde.evaluate.arrays import Array, finite, numbers
from unde.evaluate.bank.bank import train_subsets
from unde.evaluate.estimate import Estimate, signed, two_way_estimate
from unde.parallel import Executor
from unde.store.remote import StorePath

RANDOM = "random"
_UTILITY, _PREDICTION = "utility", "prediction"


@dataclass(frozen=True, eq=False, repr=False)
class Counterfactual:
    """What removals did; `counterfactual` returns it.

    Attributes:
        values: (K, Q, R) drops of each ranking and of "random": for every k, query and training seed.
        ks: How many examples were removed.
        flips: (K, Q, R) bool, of each: whether the prediction changed; None if predictions were not measured.
        trainings: How many models there are.
        of: "query" or "set".

    >>> drops = {"tracin": np.ones((1, 2, 1)), "random": np.zeros((1, 2, 1))}
    >>> Counterfactual(drops, ks=[5], flips=None, trainings=6, of="query").ks
    [5]
    """

    values: Mapping[str, np.ndarray]
    ks: list[int]
    flips: Mapping[str, np.ndarray] | None
    trainings: int
    of: str

    def drop(self, name: str, k: int) -> Estimate:
        """The fall of the utility when the top k are removed, with its interval over queries and seeds."""
        return two_way_estimate(self.values[name][self._at(k)])

    def excess(self, name: str, k: int) -> Estimate:
        """The same less that of k random examples, query by query and seed by seed."""
        return two_way_estimate(self.values[name][self._at(k)] - self.values[RANDOM][self._at(k)])

    def flipped(self, name: str, k: int) -> float:
        """The share of queries whose prediction flips when up to k examples are removed, for most seeds."""
        return float((self.smallest(name) <= k).mean())

    def smallest(self, name: str) -> np.ndarray:
        """(Q,) the smallest k that flips the prediction for most seeds; infinite if none does."""
        if self.flips is None:
            raise UndeError("predictions were not measured: call counterfactual(..., predict=)")
        most = self.flips[name].mean(2) > 0.5  # (K, Q)
        return np.where(most.any(0), np.asarray(self.ks, float)[most.argmax(0)], np.inf)

    def rows(self) -> list[list[str]]:
        """Cells of a table: ranking, k, drop, excess over random, and the share of flipped predictions."""
        out = []
        for name in self.values:
            for k in self.ks:
                drop, excess = self.drop(name, k), "" if name == RANDOM else signed(self.excess(name, k))
                share = [] if self.flips is None else [f"{100 * self.flipped(name, k):.0f} %"]
                out.append([name, f"{k:,}", signed(drop), excess, *share])
        return out

    def as_dict(self) -> dict[str, Any]:
        """The summary, ready for JSON."""
        out: dict[str, Any] = {"of": self.of, "trainings": self.trainings, "rankings": {}}
        for name in self.values:
            rows = out["rankings"][name] = {}
            for k in self.ks:
                rows[str(k)] = {"drop": self.drop(name, k).as_dict()}
                if name != RANDOM:
                    rows[str(k)]["excess"] = self.excess(name, k).as_dict()
                if self.flips is not None:
                    rows[str(k)]["flipped"] = self.flipped(name, k)
        return out

    def __repr__(self) -> str:
        k = self.ks[-1]
        best = max((n for n in self.values if n != RANDOM), key=lambda n: self.drop(n, k).mean)
        return (
            f"Counterfactual(without the top {k} of {best}: {signed(self.excess(best, k))} more than random)"
        )

    def _at(self, k: int) -> int:
        if k not in self.ks:
            raise unknown("k", k, map(str, self.ks))
        return self.ks.index(k)


def counterfactual(
    scores: Any,
    train: Callable[[np.ndarray, int], Any],
    utility: Callable[[Any], Array],
    ks: Sequence[int] = (10, 50),
    *,
    of: str = "query",
    predict: Callable[[Any], Array] | None = None,
    seeds: int = 3,
    path: str | os.PathLike[str] | StorePath | None = None,
    name: str | None = None,
    seed: int = 0,
    executor: str | Executor = "serial",
    threads: int = 1,
    stacked: int | None = None,
) -> Counterfactual:
    """Remove the top k training examples of queries, train again, and compare with the removal of k random ones.

    With Q queries, K values of k and R seeds it trains R · (1 + K + Q · K) models for one ranking, or R · (1 + 2K) for
    a set. Equal removals are trained once.

    Args:
        scores: (Q, N) scores, higher for examples to remove first, what `index.score` returns, or {name: scores} of
            several methods to compare.
        train: Function of (indices, seed) that returns a model, or a `TrainingSpec`.
        utility: Function of a model that returns one number for each query, higher is better, such as −loss.
        ks: How many examples to remove.
        of: "query": the top k of each query are removed for it alone. "set": the top k of all queries by their mean
            score are removed at once.
        predict: Function of a model that returns the predicted class of each query, to see how many removals flip it.
        seeds: Trainings of every subset.
        path: Folder that results are kept in: an interrupted run resumes. None: they are not kept.
        name: What is trained; results of another name are refused. Default: the names of the functions.
        seed: Of the random removals and all trainings.
        executor: Where models are trained, such as "processes:2".
        threads: Torch threads of each model.
        stacked: Models of a `TrainingSpec` that are trained together, as in `Bank.run`.

    Returns:
        Drops and flips, with intervals over queries and seeds.

    Raises:
        UndeError: A k is not between 1 and N − 1, scores do not fit one another or the queries, or a training failed.

    Example:
        >>> import torch
        >>> data = torch.linspace(0, 1, 20)
        >>> queries = torch.tensor([0.1, 0.9])
        >>> result = counterfactual(
        ...     -(data - queries[:, None]).abs(),
        ...     train=lambda indices, seed: data[indices].mean(),
        ...     utility=lambda model: -(model - queries).abs(),
        ...     ks=[5],
        ... )
        >>> print(f"{result.drop('scores', 5):.3f}")
        0.132 ± 0.000
    """
    rankings = _rankings(scores)
    queries, examples = next(iter(rankings.values())).shape
    ks = _check_ks(ks, examples)
    if of not in ("query", "set"):
        raise unknown("of", of, ("query", "set"))
    require_positive(seeds=seeds, threads=threads, stacked=stacked)
    models, places = _Models(examples), dict[str, np.ndarray]()
    training_seeds = np.random.SeedSequence(seed).generate_state(seeds, np.uint32).tolist()
    full = np.array([models.add([], s) for s in training_seeds])  # (R,)
    for ranking, values in rankings.items():
        lists = values.mean(0, keepdims=True) if of == "set" else values
        order = np.argsort(-lists, axis=1, kind="stable")  # (Q or 1, N)
        of_ks = [[[models.add(row[:k], s) for s in training_seeds] for row in order] for k in ks]
        places[ranking] = np.broadcast_to(np.array(of_ks), (len(ks), queries, seeds))
    draws = [np.random.default_rng([seed, r]).permutation(examples) for r in range(seeds)]
    random = [[models.add(draw[:k], s) for draw, s in zip(draws, training_seeds)] for k in ks]
    places[RANDOM] = np.broadcast_to(np.array(random)[:, None], (len(ks), queries, seeds))
    measured = train_subsets(
        train, _Measure(utility, predict), models.masks, models.seeds, path=path, name=name, seed=seed,
        executor=executor, threads=threads, stacked=stacked,
    )  # fmt: skip
    u = measured[_UTILITY]  # (S, Q)
    if u.shape[1] != queries:
        raise UndeError(
            f"utility gives {u.shape[1]} numbers, and scores have {queries} rows: expected one for each query"
        )
    q, before = np.arange(queries)[:, None], u[full].T  # (Q, R)
    drops = {ranking: before - u[at, q] for ranking, at in places.items()}
    flips = None
    if predict is not None:
        p = measured[_PREDICTION]
        flips = {ranking: p[full].T != p[at, q] for ranking, at in places.items()}
    return Counterfactual(drops, ks, flips, len(models.masks), of)


@dataclass(frozen=True)
class _Measure:
    """Utility and prediction of a model."""

    utility: Callable[[Any], Array]
    predict: Callable[[Any], Array] | None

    def __call__(self, model: Any) -> dict[str, Array]:
        measured = {_UTILITY: self.utility(model)}
        return measured if self.predict is None else measured | {_PREDICTION: self.predict(model)}


class _Models:
    """The models to train; one that is asked for twice is trained once."""

    def __init__(self, examples: int) -> None:
        self.examples, self.masks, self.seeds = examples, list[np.ndarray](), list[int]()
        self._numbers: dict[tuple[bytes, int], int] = {}

    def add(self, removed: Sequence[int] | np.ndarray, seed: int) -> int:
        mask = np.ones(self.examples, bool)
        mask[np.asarray(removed, int)] = False
        key = np.packbits(mask).tobytes(), seed
        if key not in self._numbers:
            self._numbers[key] = len(self.masks)
            self.masks.append(mask)
            self.seeds.append(seed)
        return self._numbers[key]


def _rankings(scores: Any) -> dict[str, np.ndarray]:
    named = scores if isinstance(scores, Mapping) else {"scores": scores}
    if not named or RANDOM in named:
        raise UndeError(
            f"scores names {', '.join(named) or 'nothing'}: expected rankings of other names than {RANDOM!r}"
        )
    out = {}
    for name, value in named.items():
        value = value.total() if hasattr(value, "total") else value
        values = numbers(value, f"scores[{name!r}]", "(Q, N)").astype(np.float64)
        out[str(name)] = finite(values, f"scores[{name!r}]", ("query", "example"), "leave such queries out")
    shapes = {name: values.shape for name, values in out.items()}
    if len(set(shapes.values())) > 1:
        raise UndeError(f"scores have the shapes {shapes}: expected one for all")
    return out


def _check_ks(ks: Sequence[int], examples: int) -> list[int]:
    counts = sorted({int(k) for k in to_numpy(np.asarray(ks)).reshape(-1)})
    if not counts or counts[0] < 1 or counts[-1] >= examples:
        raise UndeError(
            f"ks is {list(ks)}: expected numbers of examples to remove, from 1 to {examples - 1} of the {examples}"
        )
    return counts


# --- chosen training data ----------------------------------------------------------------------------------


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
