"""`learn_weights`: from scores to weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from unde.errors import UndeError, unknown
from unde.weights.adamw import adamw
from unde.weights.contributions import Contributions
from unde.weights.fixed_point import Grams, fixed_point
from unde.weights.objective import LOSSES
from unde.weights.problem import Fit, Problem
from unde.weights.source import Source
from unde.weights.weights import Weights

# The defaults, in this one place, as measured on weight-learning digits by experiments/choose_defaults.py.
# The solver is the first that can do the task. Raw weights under AdamW settle within ± 1 / decay: 1 keeps weights
# within a factor e of uniform ones, where 0.1 would let one group take nearly all.
K = 3
WEIGHT_DECAY = {"fixed-point": 0.1, "adamw": 1.0}
EPOCHS, LEARNING_RATE = 10, 0.01  # the paper's, for "adamw"
SOLVERS = tuple(WEIGHT_DECAY)

Positives = Sequence[int] | Tensor


@overload
def learn_weights(
    scores: Source,
    k: int = ...,
    weight_decay: float | None = ...,
    loss: str = ...,
    solver: str | None = ...,
    epochs: int = ...,
    lr: float = ...,
    positives: Positives | None = ...,
    noise: float = ...,
    seed: int = ...,
) -> Weights: ...


@overload
def learn_weights(
    scores: Mapping[str, Source],
    k: int = ...,
    weight_decay: float | None = ...,
    loss: str = ...,
    solver: str | None = ...,
    epochs: int = ...,
    lr: float = ...,
    positives: Mapping[str, Positives] | None = ...,
    noise: float = ...,
    seed: int = ...,
) -> dict[str, Weights]: ...


def learn_weights(
    scores: Source | Mapping[str, Source],
    k: int = K,
    weight_decay: float | None = None,
    loss: str = "top-k",
    solver: str | None = None,
    epochs: int = EPOCHS,
    lr: float = LEARNING_RATE,
    positives: Positives | Mapping[str, Positives] | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> Weights | dict[str, Weights]:
    """Learn how much each parameter group should count, from scores alone.

    The weights maximise, on average over the queries, the mean score of a query's k highest training
    examples over the norm of all its scores: signal over noise, with no labels and no retraining.

    scores: group-resolved scores of queries that are used for nothing else (`index.score(queries)`), or
        {concept: scores}, which gives {concept: weights}.
    k: how many of the highest-scoring training examples of a query are taken for true.
    weight_decay: how strongly weights are pulled to the unweighted method; 0 leaves them free. Each solver
        says in its module what the number means for it, and has a default of its own.
    loss: "top-k", or "supervised", "bottom-k", "top-k-bottom-k", "no-norm" of the paper's ablation.
    solver: "fixed-point" (fast; additive methods and normalised losses only) or "adamw" (Algorithm 1 of the
        paper, with its `epochs` and `lr`); None takes the first that can do it.
    positives: for "supervised", the index of the one training example that is right for each query.
    noise: s of the robustness study: adds noise of s times each group's standard deviation.

    >>> from unde.weights.source import TensorScores
    >>> generator = torch.Generator().manual_seed(0)
    >>> influence = torch.randn(20, 200, generator=generator).relu()**3
    >>> noise = torch.randn(20, 200, generator=generator)
    >>> scores = TensorScores(torch.stack([influence, noise], dim=2), groups=["signal", "noise"])
    >>> learn_weights(scores, k=5, weight_decay=0.0).groups
    ['signal', 'noise']
    >>> learn_weights(scores, k=5, weight_decay=0.0).values[0] > 1.5
    tensor(True)
    """

    def settings(source: Source) -> Settings:
        made = Settings(k, weight_decay or 0.0, loss, solver, epochs, lr, noise, seed)
        if weight_decay is None:
            return replace(made, weight_decay=WEIGHT_DECAY[made.solver_for(source)])
        return made

    if not isinstance(scores, Mapping):
        if isinstance(positives, Mapping):
            raise UndeError("positives are named by concept, scores are not: give both or neither by name")
        return _learn(scores, settings(scores), positives)
    if positives is not None and (not isinstance(positives, Mapping) or set(positives) != set(scores)):
        raise UndeError(f"positives must be named as the scores are, by concept: {', '.join(scores)}")
    named: Mapping[str, Any] = positives or {}
    return {
        concept: _learn(source, settings(source), named.get(concept)) for concept, source in scores.items()
    }


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

    def solver_for(self, source: Source) -> str:
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

    def check(self, source: Source) -> None:
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
        if self.solver_for(source) == "adamw":
            self._check_adamw()

    def _check_adamw(self) -> None:
        if self.epochs < 1 or not (self.lr > 0 and math.isfinite(self.lr)):
            raise UndeError(f"epochs={self.epochs}, lr={self.lr}: expected at least 1 and larger than 0")
        if self.lr * self.weight_decay > 1:
            raise UndeError(
                f"weight_decay {self.weight_decay} with lr {self.lr}: an AdamW step shrinks raw weights by "
                "lr·weight_decay, which must not exceed 1. Lower one of them, or use Weights.uniform"
            )


def fit(problem: Problem, settings: Settings, grams: Grams | None = None) -> Fit:
    """Solve a checked problem with the solver that the settings lead to."""
    if settings.solver_for(problem.data.source) == "fixed-point":
        return fixed_point(problem, settings.weight_decay, grams)
    return adamw(problem, settings.weight_decay, settings.epochs, settings.lr, settings.seed)


def _learn(source: Source, settings: Settings, positives: Positives | None) -> Weights:
    settings.check(source)
    known = _checked_positives(source, settings.loss, positives)
    data = Contributions(source, settings.noise, settings.seed)
    everything = torch.arange(data.queries)
    result = fit(Problem(data, everything, settings.k, settings.loss, known), settings)
    return Weights(
        result.weights, source.groups, list(source.query_digests), _provenance(source, settings, result)
    )


def _checked_positives(source: Source, loss: str, positives: Positives | None) -> Tensor | None:
    queries, examples = source.shape
    if loss != "supervised":
        if positives is not None:
            raise UndeError(f"positives are only used by loss 'supervised', and the loss is {loss!r}")
        return None
    wanted = f"expected {queries} indices, one for each query, from 0 to {examples - 1}"
    if positives is None:
        raise UndeError(f"loss 'supervised' needs positives: {wanted}")
    known = torch.as_tensor(positives).cpu()
    if known.shape != (queries,) or known.is_floating_point() or known.dtype == torch.bool:
        raise UndeError(f"positives have shape {tuple(known.shape)} and type {known.dtype}: {wanted}")
    if not ((known >= 0) & (known < examples)).all():
        raise UndeError(f"positives go from {int(known.min())} to {int(known.max())}: {wanted}")
    return known.long()


def _provenance(source: Source, settings: Settings, result: Fit) -> dict[str, Any]:
    solver = settings.solver_for(source)
    record: dict[str, Any] = {
        "method": source.method.name,
        "scores": source.provenance,
        "queries": source.shape[0],
        "examples": source.shape[1],
        "k": settings.k if settings.loss != "supervised" else None,
        "weight_decay": settings.weight_decay,
        "loss": settings.loss,
        "noise": settings.noise,
        "seed": settings.seed,
        "solver": solver,
    }
    if solver == "adamw":
        record |= {"epochs": settings.epochs, "lr": settings.lr}
    else:
        record["converged"] = result.converged
    record["objective"] = {"unweighted": result.unweighted, "curve": result.curve}
    return record
