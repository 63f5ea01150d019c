"""The examples and the seed of each retrained model, as a function of the bank's seed and the model's number."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unde.data import to_numpy
from unde.errors import UndeError, require_positive
from unde.evaluate.arrays import Array


@dataclass(frozen=True, eq=False)
class SubsetPlan:
    """The subsets and seeds of a bank of retrained models.

    Subset s depends on (seed, s) only, through numpy's raw bit streams, which are the same on every machine and in
    every numpy version.
    """

    name: str
    n_train: int
    subsets: int
    alpha: float
    seed: int
    seeds_per_subset: int = 1
    stratify: Array | None = None  # (N,) labels

    def __post_init__(self) -> None:
        require_positive(n_train=self.n_train, subsets=self.subsets, seeds_per_subset=self.seeds_per_subset)
        if self.seed < 0:
            raise UndeError(f"seed is {self.seed}: expected 0 or more")
        if not 0 < self.alpha < 1 or not 0 < self._count_members(self.n_train) < self.n_train:
            raise UndeError(
                f"alpha is {self.alpha}: expected a fraction between 0 and 1 that takes some of the "
                f"{self.n_train} training examples and leaves some"
            )
        shape = (self.n_train,) if self.stratify is None else to_numpy(self.stratify).shape
        if shape != (self.n_train,):
            raise UndeError(
                f"stratify has shape {shape}: expected one label for each of the {self.n_train} training examples"
            )

    @property
    def models(self) -> int:
        """Number of models: one for each subset and each of its seeds."""
        return self.subsets * self.seeds_per_subset

    @property
    def subset_size(self) -> int:
        return int(self._count_members(self.n_train))

    def mask(self, subset: int) -> np.ndarray:
        """(N,) True for the examples of the subset: a random α of all, and of each class if stratified.

        Classes, and the examples of each class, are put in random order; every 1/α-th of this line is taken. Each class
        gives its α share, rounded up or down, the total is exact, and every example has the same chance.
        """
        classes, labels = 1, np.zeros(self.n_train, dtype=np.int64)
        if self.stratify is not None:
            names, labels = np.unique(to_numpy(self.stratify), return_inverse=True)
            classes = len(names)
        bits = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(subset, 0)))
        class_keys, keys = np.split(bits.random_raw(classes + self.n_train), [classes])
        line = np.lexsort((keys, class_keys[labels]))
        mask = np.zeros(self.n_train, dtype=bool)
        mask[line] = np.diff(self._count_members(np.arange(self.n_train + 1))) > 0
        return mask

    def masks(self) -> np.ndarray:
        """(S, N) all subsets."""
        return np.stack([self.mask(subset) for subset in range(self.subsets)])

    def train_seed(self, subset: int, repeat: int) -> int:
        """The seed of the subset's `repeat`-th model, between 0 and 2³² − 1."""
        sequence = np.random.SeedSequence(self.seed, spawn_key=(subset, 1 + repeat))
        return int(sequence.generate_state(1, np.uint32)[0])

    def train_seeds(self) -> np.ndarray:
        """(S, R) all training seeds."""
        rows = [[self.train_seed(s, r) for r in range(self.seeds_per_subset)] for s in range(self.subsets)]
        return np.array(rows, dtype=np.int64)

    def config(self) -> dict[str, str | int | float | None]:
        """What identifies a bank, ready for JSON."""
        return {
            "name": self.name,
            "n_train": int(self.n_train),
            "subsets": int(self.subsets),
            "alpha": float(self.alpha),
            "seed": int(self.seed),
            "seeds_per_subset": int(self.seeds_per_subset),
            "stratify": None if self.stratify is None else self._digest_classes(),
        }

    def _digest_classes(self) -> str:
        """A digest of which examples share a label, whatever the names and the type of labels."""
        codes = np.unique(to_numpy(self.stratify), return_inverse=True)[1].astype("<i8")
        return hashlib.sha256(codes.tobytes()).hexdigest()[:16]

    def _count_members(self, count: np.ndarray | int) -> np.ndarray:
        """Number of examples taken from the first `count` in line."""
        return np.floor(np.asarray(count) * self.alpha + 0.5)


@dataclass(frozen=True, eq=False)
class ExplicitSubsets(SubsetPlan):
    """Subsets and training seeds as they are given, one of each for every model."""

    members: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.uint8))  # (S, N), packed along N
    model_seeds: Sequence[int] = ()
    digest: str = ""  # of both

    @classmethod
    def of(cls, name: str, masks: Sequence[np.ndarray], seeds: Sequence[int], seed: int) -> ExplicitSubsets:
        packed = np.packbits(np.stack(masks), axis=1)
        digest = hashlib.sha256(packed.tobytes() + np.asarray(seeds, "<i8").tobytes()).hexdigest()[:16]
        return cls(
            f"{name}, subsets {digest}",
            len(masks[0]),
            len(masks),
            0.5,
            seed,
            1,
            None,
            packed,
            tuple(seeds),
            digest,
        )

    @property
    def subset_size(self) -> int:
        """The smallest one."""
        return min(int(self.mask(s).sum()) for s in range(self.subsets))

    def mask(self, subset: int) -> np.ndarray:
        return np.unpackbits(self.members[subset], count=self.n_train).view(bool)

    def train_seed(self, subset: int, repeat: int) -> int:
        return int(self.model_seeds[subset])


def parse_plan(config: Any) -> SubsetPlan:
    """Read a plan that `SubsetPlan.config` has written; the labels of its classes are not stored."""
    if not isinstance(config, Mapping):
        raise UndeError(f"a plan is a {type(config).__name__}: expected names and values")
    kinds = dict.fromkeys(("n_train", "subsets", "seed", "seeds_per_subset"), int) | {
        "name": str,
        "alpha": float,
    }
    for name, kind in kinds.items():
        if type(config.get(name)) is not kind:
            raise UndeError(
                f"{name} is {config.get(name)!r} in a plan: expected a value of type {kind.__name__}"
            )
    return SubsetPlan(**{name: config[name] for name in kinds})
