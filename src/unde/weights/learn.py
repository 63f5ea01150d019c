"""`learn_weights`: weights of parameter groups from scores alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from unde import console
from unde.default_device import host_default
from unde.errors import UndeError, unknown
from unde.fingerprints import origins
from unde.scoring.arrays import Array, as_scores
from unde.scoring.data_splits import refuse_training
from unde.weights.contributions import Contributions, ResolvedScores
from unde.weights.objective import Fit, WeightProblem
from unde.weights.settings import ADAMW, EPOCHS, LEARNING_RATE, SOLVERS, WEIGHT_DECAY, K, Settings, fit
from unde.weights.weights import Weights

FEW_QUERIES = 20

Positives = Sequence[int] | Tensor


@overload
def learn_weights(
    scores: ResolvedScores | Array,
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
    scores: Mapping[str, ResolvedScores | Array], *settings: Any, **named: Any
) -> dict[str, Weights]: ...


@host_default
def learn_weights(
    scores: ResolvedScores | Array | Mapping[str, ResolvedScores | Array],
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


def check_scores(scores: Any) -> ResolvedScores:
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


def _learn(source: ResolvedScores, settings: Settings, positives: Positives | None) -> Weights:
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


def check_queries(source: ResolvedScores) -> None:
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


def _check_positives(source: ResolvedScores, objective: str, positives: Positives | None) -> Tensor | None:
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


def _provenance(source: ResolvedScores, settings: Settings, result: Fit) -> dict[str, Any]:
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
