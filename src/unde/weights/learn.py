"""`learn_weights`: weights of parameter groups from scores, with a guard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from unde import console
from unde.errors import NotRetrievable, UndeError
from unde.fingerprints import origins
from unde.scoring.arrays import Array, as_scores
from unde.scoring.data_splits import refuse_training
from unde.weights.contributions import Contributions
from unde.weights.cross_validate import choose
from unde.weights.objective import Fit, WeightProblem
from unde.weights.protocol import ResolvedScores
from unde.weights.retrieval import Judge, SelfRetrieval, best_confirmed, judge_weights
from unde.weights.settings import EPOCHS, LEARNING_RATE, WEIGHT_DECAY, Settings, fit
from unde.weights.weights import Weights

AUTO = "auto"
KS = (3, 10)  # candidates of "auto", with 1 % and 5 % of the training examples
DECAYS = {"fixed-point": (0.1, 1.0), "adamw": (1.0,)}

Positives = Sequence[int] | Tensor


@overload
def learn_weights(
    scores: ResolvedScores | Array,
    k: int | str = ...,
    weight_decay: float | str = ...,
    loss: str = ...,
    solver: str | None = ...,
    epochs: int = ...,
    lr: float = ...,
    positives: Positives | None = ...,
    noise: float = ...,
    seed: int = ...,
    judge: Judge | None = ...,
) -> Weights: ...


@overload
def learn_weights(
    scores: Mapping[str, ResolvedScores | Array], *settings: Any, **named: Any
) -> dict[str, Weights]: ...


def learn_weights(
    scores: ResolvedScores | Array | Mapping[str, ResolvedScores | Array],
    k: int | str = AUTO,
    weight_decay: float | str = AUTO,
    loss: str = "top-k",
    solver: str | None = None,
    epochs: int = EPOCHS,
    lr: float = LEARNING_RATE,
    positives: Positives | Mapping[str, Positives] | None = None,
    noise: float = 0.0,
    seed: int = 0,
    judge: Judge | None = None,
) -> Weights | dict[str, Weights]:
    """Learn how much each parameter group should count, from scores alone.

    The weights maximise, on average over the queries, the mean score of a query's k highest training
    examples over the norm of all its scores: signal over noise, with no labels and no retraining.

    Args:
        scores: Group-resolved scores of queries that are used for nothing else (`index.score(queries)`), or an array
            (Q, N, M) of another library. {concept: scores} gives {concept: weights}. Training examples are refused as
            queries; `Index.learn_weights` learns from them.
        k: How many of the highest-scoring training examples of a query count as true. "auto" tries several.
        weight_decay: Pull towards the unweighted method; 0 leaves weights free. Its scale is that of the solver, see
            `unde.weights.fixed_point` and `unde.weights.adamw`. "auto" tries several.
        loss: "top-k", or "supervised", "bottom-k", "top-k-bottom-k", "no-norm" of the paper's ablation.
        solver: "fixed-point" (fast; additive methods and normalised losses only) or "adamw" (Algorithm 1 of the
            paper). None takes the first that covers method and loss.
        epochs: Epochs of "adamw".
        lr: Learning rate of "adamw".
        positives: For "supervised", the index of the one training example that is right for each query.
        noise: s of the robustness study: adds noise of s times each group's standard deviation.
        seed: Seed of "adamw", of the noise, and of the folds of concepts.
        judge: The index of the scores, opened with its model and training data. It judges the candidates of "auto" by
            self-retrieval (see `Index.learn_weights`), at the cost of about 700 queries' features, once for each
            method. Candidates that perturbed training examples do not confirm are refused, and if all are, weights
            are uniform. Without a judge, k is 5 % of the training examples and weights are held near uniform ones.
            Concepts are judged on their held-out queries instead (`unde.weights.cross_validate`).

    Returns:
        The weights; of a mapping, {concept: weights}.

    Raises:
        UndeError: If settings do not fit the scores, queries are training examples, or all scores are zero.

    Example:
        >>> from unde.scoring import from_arrays
        >>> generator = torch.Generator().manual_seed(0)
        >>> influence = torch.randn(20, 200, generator=generator).relu()**3
        >>> noise = torch.randn(20, 200, generator=generator)
        >>> scores = from_arrays(torch.stack([influence, noise], dim=2), groups=["signal", "noise"])
        >>> learn_weights(scores, k=5, weight_decay=0.0).groups
        ['signal', 'noise']
        >>> learn_weights(scores, k=5, weight_decay=0.0).values[0] > 1.5
        tensor(True)
    """
    settings = Settings(1, 0.0, loss, solver, epochs, lr, noise, seed)
    if not isinstance(scores, Mapping):
        if isinstance(positives, Mapping):
            raise UndeError("positives are named by concept, scores are not: give both or neither by name")
        return _learn_one(_check_scores(scores), settings, k, weight_decay, positives, judge)
    if positives is not None and (not isinstance(positives, Mapping) or set(positives) != set(scores)):
        raise UndeError(f"positives must be named as the scores are, by concept: {', '.join(scores)}")
    by_concept: Mapping[str, Any] = positives or {}
    return {
        concept: _learn_one(
            _check_scores(source), settings, k, weight_decay, by_concept.get(concept), concept=True
        )
        for concept, source in scores.items()
    }


def _check_scores(scores: Any) -> ResolvedScores:
    """Convert arrays; raise for what weights cannot be learned from."""
    resolved = as_scores(scores)
    missing = [name for name in ("groups", "shape", "stream", "finish") if not hasattr(resolved, name)]
    if missing:
        raise UndeError(
            f"weights are learned from scores, there is a {type(scores).__name__}: expected index.score(queries), an "
            "array (queries, training examples, groups), or unde.scoring.from_arrays of one"
        )
    if resolved is not scores and len(resolved.groups) == 1:
        raise UndeError(
            f"scores of shape {tuple(scores.shape)} have one group, so there is nothing to weigh: expected (queries, "
            "training examples, groups), the part of each group by itself"
        )
    return resolved


def _learn_one(
    source: ResolvedScores,
    settings: Settings,
    asked_k: int | str,
    asked_decay: float | str,
    positives: Positives | None,
    judge: Judge | None = None,
    concept: bool = False,
) -> Weights:
    refuse_training(source)
    examples, solver = source.shape[1], settings.solver_for(source)
    k, decay = _parse_number("k", asked_k), _parse_number("weight_decay", asked_decay)
    usual_decay = WEIGHT_DECAY[solver]
    cautious = replace(
        settings,
        k=max(1, examples // 20) if k is None else int(k),
        weight_decay=(1.0 if k is None else usual_decay) if decay is None else decay,
    )
    cautious.check(source)
    if settings.loss == "supervised":
        return _learn(
            source, replace(cautious, weight_decay=usual_decay if decay is None else decay), positives
        )
    if k is not None and decay is not None:
        return _learn(source, cautious, positives)
    shares = {x for x in (*KS, examples // 100, examples // 20) if 1 <= x <= examples}
    ks = sorted(shares) if k is None else [cautious.k]
    decays = DECAYS[solver] if decay is None else (decay,)
    if concept and source.shape[0] > 1:
        return _cross_validate(source, cautious, ks, decays)
    if judge is None and k is None:
        console.note(
            "no judge: k is 5 % of the training examples and weights are held near uniform ones. Pass judge=index to "
            "try several, or k= and weight_decay="
        )
    retrieval = None if judge is None else _self_retrieval(source, judge)
    if retrieval is None:
        return _learn(source, cautious, positives)
    return _confirm(source, [replace(settings, k=x, weight_decay=d) for x in ks for d in decays], retrieval)


def _self_retrieval(source: ResolvedScores, judge: Judge) -> SelfRetrieval | None:
    """None, with a note, where the judge cannot run it."""
    try:
        return judge.self_retrieval(source)
    except NotRetrievable as e:
        console.note(f"these weights are not judged by self-retrieval and are held near uniform: {e}")
        return None


def _parse_number(name: str, value: float | str) -> float | None:
    """None for "auto"."""
    if isinstance(value, str) and value != AUTO:
        raise UndeError(f"{name} is {value!r}: expected a number, or 'auto'")
    return None if isinstance(value, str) else value


def _confirm(source: ResolvedScores, candidates: Sequence[Settings], judge: SelfRetrieval) -> Weights:
    """Take the candidate that self-retrieval confirms most surely; uniform weights if it confirms none."""
    data = Contributions(source, candidates[0].noise, candidates[0].seed)
    everything = torch.arange(data.queries)
    fits = fit([WeightProblem(data, everything, c.k, c.loss) for c in candidates], candidates)
    labels = [{"k": c.k, "weight_decay": c.weight_decay} for c in candidates]
    judged = judge_weights(zip(labels, (f.weights.float() for f in fits)), judge.trials)
    best = best_confirmed(judged, judge.candidates)
    verdict = {"candidates": [j.as_dict() for j in judged], "confirmed": best is not None}
    if best is None:
        console.note(
            "weights stay uniform, the unweighted method: self-retrieval confirms none of the candidates"
        )
        record = {"method": source.method.name, "scores": source.provenance, "loss": candidates[0].loss}
        return Weights(
            torch.ones(data.groups), source.groups, origins(source.query_digests), record | verdict
        )
    which = judged.index(best)
    record = _provenance(source, candidates[which], fits[which]) | verdict
    return Weights(best.weights, source.groups, origins(source.query_digests), record)


def _cross_validate(
    source: ResolvedScores, settings: Settings, ks: Sequence[int], decays: Sequence[float]
) -> Weights:
    """Take the k and decay that do best on held-out queries of a concept; uniform weights if none gains."""
    choice = choose(source, ks, decays, settings.solver, seed=settings.seed)
    if choice.gain > 1:
        weights = _learn(source, replace(settings, k=choice.k, weight_decay=choice.weight_decay), None)
        return replace(weights, provenance=weights.provenance | {"held-out gain": choice.gain})
    console.note("weights stay uniform, the unweighted method: no candidate gains on held-out queries")
    record = {"method": source.method.name, "scores": source.provenance, "held-out gain": choice.gain}
    return Weights(torch.ones(len(source.groups)), source.groups, origins(source.query_digests), record)


def _learn(source: ResolvedScores, settings: Settings, positives: Positives | None) -> Weights:
    settings.check(source)
    known = _check_positives(source, settings.loss, positives)
    data = Contributions(source, settings.noise, settings.seed)
    everything = torch.arange(data.queries)
    (result,) = fit([WeightProblem(data, everything, settings.k, settings.loss, known)], [settings])
    return Weights(
        result.weights, source.groups, origins(source.query_digests), _provenance(source, settings, result)
    )


def _check_positives(source: ResolvedScores, loss: str, positives: Positives | None) -> Tensor | None:
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


def _provenance(source: ResolvedScores, settings: Settings, result: Fit) -> dict[str, Any]:
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
