"""`learn_weights`: weights of parameter groups from scores alone, by settings that are checked first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from unde import console
from unde.default_device import host_default
from unde.errors import UndeError, unknown
from unde.fingerprints import origins
from unde.scoring.arrays import Array, as_scores
from unde.scoring.base import Scores
from unde.scoring.data_splits import refuse_training
from unde.weights.adamw import adamw
from unde.weights.contributions import Contributions
from unde.weights.fixed_point import fixed_points
from unde.weights.objective import OBJECTIVES, Fit, WeightProblem
from unde.weights.weights import Weights

ADAMW, FIXED_POINT = "adamw", "fixed-point"
# Raw weights under AdamW settle within ± 1 / decay: 0.5 keeps weights within a factor e² of uniform ones.
WEIGHT_DECAY = {ADAMW: 0.5, FIXED_POINT: 0.1}
SOLVERS = tuple(WEIGHT_DECAY)
K, EPOCHS, LEARNING_RATE = 5, 10, 0.01  # epochs and learning rate are the paper's
SMALL_K = 3  # where a weak decay lets one or two groups take all
WEAK_DECAY = {ADAMW: 0.5, FIXED_POINT: 1.0}  # less is weak
FEW_QUERIES = 20

Positives = Sequence[int] | Tensor


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

    def check(self, source: Scores) -> None:
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

    def _check_adamw(self, source: Scores) -> None:
        if self.epochs < 1 or not (self.lr > 0 and math.isfinite(self.lr)):
            raise UndeError(f"epochs={self.epochs}, lr={self.lr}: expected at least 1 and larger than 0")
        if self.lr * self.weight_decay > 1:
            raise UndeError(
                f"weight_decay {self.weight_decay} with lr {self.lr}: an AdamW step shrinks raw weights by "
                "lr·weight_decay, which must not exceed 1. Lower one of them, or use Weights.uniform"
            )

    def _check_fixed_point(self, source: Scores) -> None:
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


@overload
def learn_weights(
    scores: Scores | Array,
    objective: str = ...,
    k: int = ...,
    weight_decay: float | None = ...,
    solver: str = ...,
    epochs: int = ...,
    lr: float = ...,
    positives: Positives | None = ...,
    noise: float = ...,
    penalty: float = ...,
    seed: int = ...,
) -> Weights: ...


@overload
def learn_weights(
    scores: Mapping[str, Scores | Array], *settings: Any, **named: Any
) -> dict[str, Weights]: ...


@host_default
def learn_weights(
    scores: Scores | Array | Mapping[str, Scores | Array],
    objective: str = "top-k",
    k: int = K,
    weight_decay: float | None = None,
    solver: str = ADAMW,
    epochs: int = EPOCHS,
    lr: float = LEARNING_RATE,
    positives: Positives | Mapping[str, Positives] | None = None,
    noise: float = 0.0,
    penalty: float = 0.0,
    seed: int = 0,
) -> Weights | dict[str, Weights]:
    """Learn how much each parameter group should count, from scores alone: Algorithm 1 of the paper.

    The weights maximise, on average over the queries, the mean score of a query's k highest training
    examples over the norm of all its scores: signal over noise, with no labels and no retraining.
    Nothing here says whether they help on your model: `Index.calibrate` does.

    Args:
        scores: Group-resolved scores of queries that are used for nothing else (`index.score(queries)`), or an array
            (Q, N, M) of another library. {concept: scores} gives {concept: weights}. Training examples are refused as
            queries. 100 to 500 queries are usual.
        objective: "top-k", or "supervised", "bottom-k", "top-k-bottom-k", "no-norm" of the paper's ablation.
        k: How many of the highest-scoring training examples of a query count as true. The paper searches 1 to 5000
            (`unde.evaluate.search`).
        weight_decay: λ′, a pull towards the unweighted method: of "adamw" the decoupled decay of raw weights, 0.5 by
            default; of "fixed-point" the strength of its penalty λ′/2 · ‖w − 1‖² / M, 0.1 by default.
        solver: "adamw", Algorithm 1 of the paper; or "fixed-point", ours: another penalty, stops by itself, additive
            methods and normalised objectives only.
        epochs: Epochs of "adamw", in each of which it takes one step for each query.
        lr: Learning rate of "adamw" at the start; it falls to 0 along a cosine.
        positives: For "supervised", the index of the one training example that is right for each query.
        noise: s of the robustness study: adds noise of s times each group's standard deviation.
        penalty: λ of the paper's Eq. 6, which adds λ‖w‖₂ (of weights with sum 1) to the loss of "adamw".
        seed: Seed of the start and the order of queries of "adamw", and of the noise.

    Returns:
        The weights; of a mapping, {concept: weights}.

    Raises:
        UndeError: If settings do not fit the scores, queries are training examples or all alike, there is one group,
            or no contribution is positive.

    Example:
        >>> from unde.scoring import from_arrays
        >>> generator = torch.Generator().manual_seed(0)
        >>> influence = torch.randn(40, 200, generator=generator).relu()**3
        >>> noise = torch.randn(40, 200, generator=generator)
        >>> scores = from_arrays(torch.stack([influence, noise], dim=2), groups=["signal", "noise"])
        >>> learn_weights(scores).groups
        ['signal', 'noise']
        >>> learn_weights(scores, k=5, weight_decay=0.0).values[0] > 1.5
        tensor(True)
    """
    if solver not in SOLVERS:
        raise unknown("solver", solver, SOLVERS)
    decay = WEIGHT_DECAY[solver] if weight_decay is None else weight_decay
    settings = Settings(k, decay, objective, solver, epochs, lr, noise, penalty, seed)
    if not isinstance(scores, Mapping):
        if isinstance(positives, Mapping):
            raise UndeError("positives are named by concept, scores are not: give both or neither by name")
        return _learn(check_scores(scores), settings, positives)
    if positives is not None and (not isinstance(positives, Mapping) or set(positives) != set(scores)):
        raise UndeError(f"positives must be named as the scores are, by concept: {', '.join(scores)}")
    by_concept: Mapping[str, Any] = positives or {}
    checked = {concept: check_scores(source) for concept, source in scores.items()}
    return {concept: _learn(source, settings, by_concept.get(concept)) for concept, source in checked.items()}


def check_scores(scores: Any) -> Scores:
    """Convert arrays; raise for what weights cannot be learned from."""
    resolved = as_scores(scores)
    missing = [name for name in ("groups", "shape", "stream", "finish") if not hasattr(resolved, name)]
    if missing:
        raise UndeError(
            f"weights are learned from scores, there is a {type(scores).__name__}: expected index.score(queries), an "
            "array (queries, training examples, groups), or unde.scoring.from_arrays of one"
        )
    if len(resolved.groups) == 1:
        raise UndeError(
            f"scores of shape {tuple(scores.shape)} have one group, so there is nothing to weigh: expected the part of "
            "each group by itself, (queries, training examples, groups), or an index with groups='layer' or 'tensor'"
        )
    refuse_training(resolved)
    return resolved


def _learn(source: Scores, settings: Settings, positives: Positives | None) -> Weights:
    settings = settings.with_default_k(source.shape[1])
    settings.check(source)
    known = _check_positives(source, settings.objective, positives)
    settings.warn()
    check_queries(source)
    data = Contributions(source, settings.noise, settings.seed)
    everything = torch.arange(data.queries)
    (result,) = fit([WeightProblem(data, everything, settings.k, settings.objective, known)], [settings])
    check_signs(data)
    return Weights(
        result.weights, source.groups, origins(source.query_digests), _provenance(source, settings, result)
    )


def check_queries(source: Scores) -> None:
    """Raise if all queries are the same; say so if they are few."""
    count = source.shape[0]
    first = next(iter(source.stream(slice(0, 1))))[1]
    alike = all(torch.equal(next(iter(source.stream(slice(q, q + 1))))[1], first) for q in range(1, count))
    if count > 1 and alike and first.any():
        raise UndeError(
            f"all {count} queries have the same scores: expected different queries, 100 to 500, that are like those "
            "which will be asked"
        )
    if count < FEW_QUERIES:
        console.note(
            f"weights are learned from {console.counted(count, 'query')}: expected {FEW_QUERIES} or more, and 100 to "
            "500 are usual. So few say little about other queries"
        )


def check_signs(data: Contributions) -> None:
    """Raise if no contribution that was read is positive; say so if none is negative."""
    if data.high <= 0 > data.low:
        raise UndeError(
            "no contribution is positive: expected some, since a positive score marks a training example that lowers "
            "the loss of the query. Negate scores of another convention"
        )
    if data.low >= 0 < data.high:
        console.note(
            "no contribution is negative, which gradients rarely do: weights go by the sizes of contributions alone"
        )


def _check_positives(source: Scores, objective: str, positives: Positives | None) -> Tensor | None:
    queries, examples = source.shape
    if objective != "supervised":
        if positives is not None:
            raise UndeError(f"positives are only used by objective 'supervised', and this is {objective!r}")
        return None
    wanted = f"expected {queries} indices, one for each query, from 0 to {examples - 1}"
    if positives is None:
        raise UndeError(f"objective 'supervised' needs positives: {wanted}")
    known = torch.as_tensor(positives).cpu()
    if known.shape != (queries,) or known.is_floating_point() or known.dtype == torch.bool:
        raise UndeError(f"positives have shape {tuple(known.shape)} and type {known.dtype}: {wanted}")
    if not ((known >= 0) & (known < examples)).all():
        raise UndeError(f"positives go from {int(known.min())} to {int(known.max())}: {wanted}")
    return known.long()


def _provenance(source: Scores, settings: Settings, result: Fit) -> dict[str, Any]:
    record: dict[str, Any] = {
        "method": source.method.name,
        "scores": source.provenance,
        "queries": source.shape[0],
        "examples": source.shape[1],
        "k": settings.k if settings.objective != "supervised" else None,
        "weight_decay": settings.weight_decay,
        "noise": settings.noise,
        "seed": settings.seed,
        "solver": settings.solver,
    }
    if settings.solver == ADAMW:
        record |= {"epochs": settings.epochs, "lr": settings.lr, "penalty": settings.penalty}
    else:
        record["converged"] = result.converged
    curve = {"unweighted": result.unweighted, "curve": result.curve}
    return record | {"objective": {"name": settings.objective, **curve}}
