"""What weights are asked to be learned with, and which solver that leads to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unde.errors import UndeError, unknown
from unde.weights.adamw import adamw
from unde.weights.fixed_point import fixed_points
from unde.weights.objective import LOSSES, Fit, WeightProblem
from unde.weights.protocol import ResolvedScores

# Raw weights under AdamW settle within ± 1 / decay: 1 keeps weights within a factor e of uniform ones, where 0.1 would
# let one group take nearly all. The solver is the first that can do the task.
WEIGHT_DECAY = {"fixed-point": 0.1, "adamw": 1.0}
SOLVERS = tuple(WEIGHT_DECAY)
EPOCHS, LEARNING_RATE = 10, 0.01  # the paper's, for "adamw"


@dataclass(frozen=True)
class Settings:
    """What `learn_weights` was asked for; `checked` against the scores it is for."""

    k: int
    weight_decay: float
    loss: str = "top-k"
    solver: str | None = None
    epochs: int = EPOCHS
    lr: float = LEARNING_RATE
    noise: float = 0.0
    seed: int = 0

    def solver_for(self, source: ResolvedScores) -> str:
        """The solver's name, or an error if it cannot do the task."""
        covered = source.method.linear and self.loss != "no-norm"
        if self.solver is None:
            return "fixed-point" if covered else "adamw"
        if self.solver not in SOLVERS:
            raise unknown("solver", self.solver, SOLVERS)
        if self.solver == "fixed-point" and not covered:
            why = (
                f"method {source.method.name!r}, whose scores are not sums over groups"
                if not source.method.linear
                else "loss 'no-norm', which has no optimum but all weight on one group"
            )
            raise UndeError(f"solver 'fixed-point' does not cover {why}: use solver='adamw'")
        return self.solver

    def check(self, source: ResolvedScores) -> None:
        """Raise what is wrong with these settings for the scores of `source`."""
        queries, examples = source.shape
        if queries == 0 or examples == 0:
            raise UndeError(
                f"no weights can be learned from {queries} queries and {examples} training examples: "
                "expected at least one of each"
            )
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, LOSSES)
        if self.loss != "supervised" and not 1 <= self.k <= examples:
            raise UndeError(
                f"k is {self.k}: expected a number from 1 to {examples}, the number of training examples; "
                "about 10 is usual"
            )
        for name, value in (("weight_decay", self.weight_decay), ("noise", self.noise)):
            if not (value >= 0 and math.isfinite(value)):
                raise UndeError(f"{name} is {value}: expected a finite number, 0 or larger")
        if self.seed < 0:
            raise UndeError(f"seed is {self.seed}: expected a whole number, 0 or larger")
        if self.solver_for(source) != "adamw":
            return
        if self.epochs < 1 or not (self.lr > 0 and math.isfinite(self.lr)):
            raise UndeError(f"epochs={self.epochs}, lr={self.lr}: expected at least 1 and larger than 0")
        if self.lr * self.weight_decay > 1:
            raise UndeError(
                f"weight_decay {self.weight_decay} with lr {self.lr}: an AdamW step shrinks raw weights by "
                "lr·weight_decay, which must not exceed 1. Lower one of them, or use Weights.uniform"
            )


def fit(problems: Sequence[WeightProblem], settings: Sequence[Settings]) -> list[Fit]:
    """Solve checked problems, which differ in settings other than the solver and have the same queries."""
    if settings[0].solver_for(problems[0].data.source) == "fixed-point":
        return fixed_points(problems, [s.weight_decay for s in settings])
    return [adamw(p, s.weight_decay, s.epochs, s.lr, s.seed) for p, s in zip(problems, settings)]
