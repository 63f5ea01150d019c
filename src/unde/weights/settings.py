"""What weights are asked to be learned with, checked, and the solver that it leads to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unde import console
from unde.errors import UndeError, unknown
from unde.weights.adamw import adamw
from unde.weights.contributions import ResolvedScores
from unde.weights.fixed_point import fixed_points
from unde.weights.objective import OBJECTIVES, Fit, WeightProblem

ADAMW, FIXED_POINT = "adamw", "fixed-point"
# Raw weights under AdamW settle within ± 1 / decay: 0.5 keeps weights within a factor e² of uniform ones.
WEIGHT_DECAY = {ADAMW: 0.5, FIXED_POINT: 0.1}
SOLVERS = tuple(WEIGHT_DECAY)
K, EPOCHS, LEARNING_RATE = 5, 10, 0.01  # epochs and learning rate are the paper's
SMALL_K = 3  # where a weak decay lets one or two groups take all
WEAK_DECAY = {ADAMW: 0.5, FIXED_POINT: 1.0}  # less is weak


@dataclass(frozen=True)
class Settings:
    """What `learn_weights` was asked for; `check` compares it with the scores it is for."""

    k: int = K
    weight_decay: float = WEIGHT_DECAY[ADAMW]
    objective: str = "top-k"
    solver: str = ADAMW
    epochs: int = EPOCHS
    lr: float = LEARNING_RATE
    noise: float = 0.0
    penalty: float = 0.0
    seed: int = 0

    def with_default_k(self, examples: int) -> Settings:
        """The same; of fewer training examples than the default k, k is all of them."""
        return replace(self, k=examples) if self.k == K > examples else self

    def check(self, source: ResolvedScores) -> None:
        """Raise what is wrong with these settings for the scores of `source`."""
        queries, examples = source.shape
        if queries == 0 or examples == 0:
            raise UndeError(
                f"no weights can be learned from {queries} queries and {examples} training examples: "
                "expected at least one of each"
            )
        if self.objective not in OBJECTIVES:
            raise unknown("objective", self.objective, OBJECTIVES)
        if self.solver not in SOLVERS:
            raise unknown("solver", self.solver, SOLVERS)
        if self.objective != "supervised" and not (
            isinstance(self.k, int) and not isinstance(self.k, bool) and 1 <= self.k <= examples
        ):
            raise UndeError(
                f"k is {self.k!r}: expected a whole number from 1 to {examples}, the number of training examples"
            )
        for name in ("weight_decay", "noise", "penalty"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and value >= 0 and math.isfinite(value)):
                raise UndeError(f"{name} is {value!r}: expected a finite number, 0 or larger")
        if self.seed < 0:
            raise UndeError(f"seed is {self.seed}: expected a whole number, 0 or larger")
        (self._check_adamw if self.solver == ADAMW else self._check_fixed_point)(source)

    def warn(self) -> None:
        """Say where these settings are known to fail."""
        if self.objective != "supervised" and self.k <= SMALL_K:
            least = WEAK_DECAY[self.solver]
            if self.weight_decay < least:
                console.note(
                    f"k={self.k} with weight_decay={self.weight_decay:g} often gives nearly all weight to one or two "
                    f"groups: take k=5 or more, or a weight_decay of {least:g} or more"
                )

    def _check_adamw(self, source: ResolvedScores) -> None:
        if self.epochs < 1 or not (self.lr > 0 and math.isfinite(self.lr)):
            raise UndeError(f"epochs={self.epochs}, lr={self.lr}: expected at least 1 and larger than 0")
        if self.lr * self.weight_decay > 1:
            raise UndeError(
                f"weight_decay {self.weight_decay} with lr {self.lr}: an AdamW step shrinks raw weights by "
                "lr·weight_decay, which must not exceed 1. Lower one of them, or use Weights.uniform"
            )

    def _check_fixed_point(self, source: ResolvedScores) -> None:
        if self.penalty:
            raise UndeError(
                "penalty is λ of the paper's Eq. 6, for solver 'adamw': 'fixed-point' has a penalty of its own, whose "
                "strength is weight_decay"
            )
        if source.method.linear and self.objective != "no-norm":
            return
        why = (
            f"method {source.method.name!r}, whose scores are not sums over groups"
            if not source.method.linear
            else "objective 'no-norm', which has no optimum but all weight on one group"
        )
        raise UndeError(f"solver 'fixed-point' does not cover {why}: use solver='adamw'")


def fit(problems: Sequence[WeightProblem], settings: Sequence[Settings]) -> list[Fit]:
    """Solve checked problems of the same queries; settings differ in k, weight decay and penalty alone."""
    first = settings[0]
    if first.solver == FIXED_POINT:
        return fixed_points(problems, [s.weight_decay for s in settings])
    return adamw(
        problems,
        [s.weight_decay for s in settings],
        penalties=[s.penalty for s in settings],
        epochs=first.epochs,
        lr=first.lr,
        seed=first.seed,
    )
