"""`learn_weights`: from scores to weights."""

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
from unde.weights import retrieval
from unde.weights.contributions import Contributions
from unde.weights.cross_validate import choose
from unde.weights.problem import Fit, Problem
from unde.weights.protocol import ResolvedScores
from unde.weights.settings import EPOCHS, LEARNING_RATE, WEIGHT_DECAY, Settings, fit
from unde.weights.weights import Weights

AUTO = "auto"
KS = (3, 10)  # to choose from with "auto", and so are 1 % and 5 % of the training examples
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
) -> Weights: ...


@overload
def learn_weights(
    scores: Mapping[str, ResolvedScores | Array],
    k: int | str = ...,
    weight_decay: float | str = ...,
    loss: str = ...,
    solver: str | None = ...,
    epochs: int = ...,
    lr: float = ...,
    positives: Mapping[str, Positives] | None = ...,
    noise: float = ...,
    seed: int = ...,
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
) -> Weights | dict[str, Weights]:
    """Learn how much each parameter group should count, from scores alone.

    The weights maximise, on average over the queries, the mean score of a query's k highest training
    examples over the norm of all its scores: signal over noise, with no labels and no retraining.

    scores: group-resolved scores of queries that are used for nothing else (`index.score(queries)`), or
        {concept: scores}, which gives {concept: weights}; or those of another library, as an array (Q, N, M) or as
        `unde.scoring.from_arrays` names them. Training examples are refused as queries: to learn from them there is
        `Index.learn_weights`.
    k: how many of the highest-scoring training examples of a query are taken for true.
    weight_decay: how strongly weights are pulled to the unweighted method; 0 leaves them free. Each solver
        says in its module what the number means for it.
        "auto", for either, tries several. Which k is right differs from one data set to the next, and a wrong one makes
        attributions worse; the objective itself does not tell. So candidates are judged by self-retrieval (see
        `Index.learn_weights`): the one with which perturbed training examples find themselves most surely is taken, if
        they do so nearly as surely as with weights of self-retrieval's own; else weights are uniform. That costs about
        700 queries' features, once for each method. Scores without their model and training data at hand (opened
        without, or tensors) cannot be judged: then k is 5 % of the training examples and weights are held near
        uniform ones. Concepts are judged on their own held-out queries instead (`unde.weights.cross_validate`).
    loss: "top-k", or "supervised", "bottom-k", "top-k-bottom-k", "no-norm" of the paper's ablation.
    solver: "fixed-point" (fast; additive methods and normalised losses only) or "adamw" (Algorithm 1 of the
        paper, with its `epochs` and `lr`); None takes the first that can do it.
    positives: for "supervised", the index of the one training example that is right for each query.
    noise: s of the robustness study: adds noise of s times each group's standard deviation.

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

    asked = Settings(1, 0.0, loss, solver, epochs, lr, noise, seed)
    if not isinstance(scores, Mapping):
        if isinstance(positives, Mapping):
            raise UndeError("positives are named by concept, scores are not: give both or neither by name")
        return _for_one(_resolved(scores), asked, k, weight_decay, positives)
    if positives is not None and (not isinstance(positives, Mapping) or set(positives) != set(scores)):
        raise UndeError(f"positives must be named as the scores are, by concept: {', '.join(scores)}")
    named: Mapping[str, Any] = positives or {}
    return {
        concept: _for_one(_resolved(source), asked, k, weight_decay, named.get(concept), concept=True)
        for concept, source in scores.items()
    }


def _resolved(scores: Any) -> ResolvedScores:
    """Scores that weights can be learned from, of whatever was given."""
    found = as_scores(scores)
    missing = [name for name in ("groups", "shape", "stream", "finish") if not hasattr(found, name)]
    if missing:
        raise UndeError(
            f"weights are learned from scores, there is a {type(scores).__name__}: expected index.score(queries), an "
            "array (queries, training examples, groups), or unde.scoring.from_arrays of one"
        )
    if found is not scores and len(found.groups) == 1:
        raise UndeError(
            f"scores of shape {tuple(scores.shape)} have one group, so there is nothing to weigh: expected (queries, "
            "training examples, groups), the part of each group by itself"
        )
    return found


def _for_one(
    source: ResolvedScores,
    asked: Settings,
    k: int | str,
    decay: float | str,
    positives: Positives | None,
    concept: bool = False,
) -> Weights:
    refuse_training(source)
    examples, solver = source.shape[1], asked.solver_for(source)
    known = _number("k", k), _number("weight_decay", decay)
    cautious = replace(
        asked,
        k=max(1, examples // 20) if known[0] is None else int(known[0]),
        weight_decay=(1.0 if known[0] is None else WEIGHT_DECAY[solver]) if known[1] is None else known[1],
    )
    cautious.check(source)
    if asked.loss == "supervised":
        return _learn(source, replace(cautious, weight_decay=_or(known[1], WEIGHT_DECAY[solver])), positives)
    if None not in known:
        return _learn(source, cautious, positives)
    shares = {x for x in (*KS, examples // 100, examples // 20) if 1 <= x <= examples}
    ks = sorted(shares) if known[0] is None else [cautious.k]
    decays = DECAYS[solver] if known[1] is None else (known[1],)
    if concept and source.shape[0] > 1:
        return _held_out(source, cautious, ks, decays)
    judge = None if concept else _judge_of(source)
    if judge is None:
        return _learn(source, cautious, positives)
    return _confirmed(source, [replace(asked, k=x, weight_decay=d) for x in ks for d in decays], judge)


def _judge_of(source: ResolvedScores) -> Any:
    """Self-retrieval of the same method, or None where it cannot be run."""
    try:
        return getattr(source, "judge", lambda: None)()
    except NotRetrievable as e:
        console.note(f"these weights are not judged by self-retrieval and are held near uniform: {e}")
        return None


def _number(name: str, value: float | str) -> float | None:
    """None for "auto"."""
    if isinstance(value, str) and value != AUTO:
        raise UndeError(f"{name} is {value!r}: expected a number, or 'auto'")
    return None if isinstance(value, str) else value


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _confirmed(source: ResolvedScores, candidates: Sequence[Settings], judge: Any) -> Weights:
    """Of the candidates the one that self-retrieval confirms most surely; uniform weights if it confirms none."""
    data = Contributions(source, candidates[0].noise, candidates[0].seed)
    everything = torch.arange(data.queries)
    fits = fit([Problem(data, everything, c.k, c.loss) for c in candidates], candidates)
    asked = [{"k": c.k, "weight_decay": c.weight_decay} for c in candidates]
    judged = retrieval.judge(zip(asked, (f.weights.float() for f in fits)), judge.trials)
    best = retrieval.confirmed(judged, judge.own)
    story = {"candidates": [j.as_dict() for j in judged], "confirmed": best is not None}
    if best is None:
        console.note(
            "weights stay uniform, the unweighted method: self-retrieval confirms none of the candidates"
        )
        record = {"method": source.method.name, "scores": source.provenance, "loss": candidates[0].loss}
        return Weights(torch.ones(data.groups), source.groups, origins(source.query_digests), record | story)
    which = judged.index(best)
    record = _provenance(source, candidates[which], fits[which]) | story
    return Weights(best.weights, source.groups, origins(source.query_digests), record)


def _held_out(source: ResolvedScores, asked: Settings, ks: Sequence[int], decays: Sequence[float]) -> Weights:
    """The k and decay that do best on held-out queries of the same concept; uniform weights if none gains."""
    choice = choose(source, ks, decays, asked.solver, seed=asked.seed)
    if choice.gain > 1:
        weights = _learn(source, replace(asked, k=choice.k, weight_decay=choice.weight_decay), None)
        return replace(weights, provenance=weights.provenance | {"held-out gain": choice.gain})
    console.note("weights stay uniform, the unweighted method: no candidate gains on held-out queries")
    record = {"method": source.method.name, "scores": source.provenance, "held-out gain": choice.gain}
    return Weights(torch.ones(len(source.groups)), source.groups, origins(source.query_digests), record)


def _learn(source: ResolvedScores, settings: Settings, positives: Positives | None) -> Weights:
    settings.check(source)
    known = _checked_positives(source, settings.loss, positives)
    data = Contributions(source, settings.noise, settings.seed)
    everything = torch.arange(data.queries)
    (result,) = fit([Problem(data, everything, settings.k, settings.loss, known)], [settings])
    return Weights(
        result.weights, source.groups, origins(source.query_digests), _provenance(source, settings, result)
    )


def _checked_positives(source: ResolvedScores, loss: str, positives: Positives | None) -> Tensor | None:
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
