"""The paper's search (app. B.4): k, weight decay and damping by a measure on the learning queries, cross-fitted.

Weights are always learned without labels, by Algorithm 1 on the learning queries; the truth only chooses among them. An
estimate of what was chosen may not use the same truth: queries are split in two folds, and retrained models in four.
For each fold, weights are learned from the other queries, the candidate is chosen on the other queries and models, and
the fold judges it. The setting that is returned is chosen on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from unde import console
from unde.errors import UndeError
from unde.evaluate.calibration import crossfit_folds
from unde.evaluate.estimate import Estimate, paired
from unde.evaluate.ground_truth import FEWEST_TO_SPLIT, Truth, read_truth
from unde.fingerprints import origins
from unde.weights.contributions import Contributions
from unde.weights.learn import EPOCHS, LEARNING_RATE, Settings, check_queries, check_scores, fit
from unde.weights.objective import WeightProblem
from unde.weights.weights import Weights

KS = (1, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)  # the paper's
DECAYS = (0, 0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.8, 1.0, 1.5)  # the paper's
DAMPINGS = (0.01, 0.1, 1.0, 10.0, 100.0)

Source: TypeAlias = Any  # scores of an index, or an array (Q, N, M)


@dataclass(frozen=True, eq=False)
class SearchCandidate:
    """Weights of one setting, learned from all queries, and the measure on these; None for unweighted scores."""

    damping: Any
    k: int | None
    weight_decay: float | None
    value: float
    weights: Weights

    @property
    def setting(self) -> str:
        """The setting in words."""
        parts = [] if self.damping is None else [f"damping {self.damping}"]
        parts += ["unweighted"] if self.k is None else [f"k {self.k}", f"weight decay {self.weight_decay:g}"]
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class WeightSearch:
    """What `search` chose, and what it is worth.

    Attributes:
        best: The chosen candidate; `best.k`, `best.weight_decay`, `best.damping`.
        candidates: All candidates, the best first.
        without: The unweighted scores, one for each damping, the best first.
        measure: What candidates were compared by.
        weighted: The measure of the choice, cross-fitted: no query or model judges what it helped to choose.
        unweighted: The same of unweighted scores, whose damping is chosen in the same way.

    >>> rng = torch.Generator().manual_seed(0)
    >>> contributions = torch.randn(24, 40, 2, generator=rng)
    >>> found = search(contributions, contributions[:, :, 0] > 1.5, ks=[5], decays=[0.5])
    >>> found.best.setting, found.weights.values[0] > 1
    ('k 5, weight decay 0.5', tensor(True))
    """

    best: SearchCandidate
    candidates: list[SearchCandidate]
    without: list[SearchCandidate]
    measure: str
    weighted: Estimate
    unweighted: Estimate

    @property
    def weights(self) -> Weights:
        """The weights of the chosen setting, learned from all queries."""
        return self.best.weights

    @property
    def difference(self) -> Estimate:
        """Weighted − unweighted, query by query, cross-fitted."""
        return paired(self.unweighted, self.weighted)

    def table(self, rows: int = 10) -> str:
        """The best candidates and the unweighted scores, one to a line, by the measure that they were chosen by."""
        shown = [*self.candidates[:rows], *self.without]
        width = max(len(c.setting) for c in shown)
        lines = [f"{c.setting:<{width}}  {100 * c.value:6.2f}" for c in shown]
        rest = len(self.candidates) - rows
        return "\n".join(
            [f"{'':<{width}}  {self.measure}, %", *lines, *([f"… and {rest} more"] * (rest > 0))]
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything but the weights of candidates, ready for JSON."""
        names = ("damping", "k", "weight_decay", "value")
        return {
            "measure": self.measure,
            "chosen": self.best.setting,
            "weighted": self.weighted.as_dict(),
            "unweighted": self.unweighted.as_dict(),
            "difference": self.difference.as_dict(),
            "candidates": [{n: getattr(c, n) for n in names} for c in (*self.candidates, *self.without)],
        }

    def __str__(self) -> str:
        gain = f"{100 * self.difference.mean:+.2f} ± {100 * self.difference.ci95:.2f}".replace("-", "−")
        return (
            f"{self.best.setting} of {len(self.candidates)} candidates: cross-fitted {self.measure} "
            f"{100 * self.unweighted.mean:.2f} % without and {100 * self.weighted.mean:.2f} % with weights ({gain})"
        )


def search(
    scores: Source | Mapping[Any, Source] | Callable[[Any], Source],
    truth: Any,
    ks: Sequence[int] = KS,
    decays: Sequence[float] = DECAYS,
    dampings: Sequence[Any] | Mapping[Any, Source] | Callable[[Any], Source] | None = None,
    *,
    objective: str = "top-k",
    epochs: int = EPOCHS,
    lr: float = LEARNING_RATE,
    seed: int = 0,
) -> WeightSearch:
    """Search k, weight decay and damping of Algorithm 1 by a truth about the learning queries: the paper's search.

    All candidates take their steps together, in one pass over the contributions of a damping. Queries are split in two
    folds (retrained models in four): what a fold judges was learned and chosen on the others.

    Args:
        scores: Scores of the learning queries (`index.score(queries)`), or an array (Q, N, M).
        truth: What chooses. A bank of retrained models of these queries (`unde.evaluate.Bank` or (masks, utility)) or
            a `Calibration` of them: by LDS. (Q, N) bool, the known contributors of each query: by Recall@10. (Q,)
            bool, the queries whose label is known to be wrong: by the AUC of opposition, −Σ of a query's 10 smallest
            scores.
        ks: Values of k; those beyond the number of training examples are left out.
        decays: Values of the weight decay.
        dampings: Scores under other dampings, {damping: scores}, or a function damping → scores, which is called for
            0.01, 0.1, 1, 10 and 100; or a sequence of dampings, where `scores` is such a function.
        objective: The objective of `unde.learn_weights`.
        epochs: Epochs of Algorithm 1.
        lr: Its learning rate.
        seed: Seed of Algorithm 1 and of the folds.

    Returns:
        The chosen setting with its weights, all candidates, and cross-fitted estimates with and without weights. The
        weights were learned from these queries and cannot be used on them.

    Raises:
        UndeError: If the truth does not fit the scores, queries are training examples, or a setting is wrong.

    Example:
        >>> rng = torch.Generator().manual_seed(0)
        >>> influence = torch.randn(40, 60, generator=rng).relu() ** 3
        >>> noise = 2 * torch.randn(40, 60, generator=rng)
        >>> masks = torch.rand(32, 60, generator=rng) < 0.5
        >>> result = search(torch.stack([influence, noise], 2), (masks, masks.float() @ influence.T), ks=[1, 5])
        >>> result.measure, len(result.candidates), result.difference.mean > 0.1
        ('LDS', 20, True)
    """
    sources = _sources(scores, dampings)
    first = next(iter(sources.values()))
    queries, examples = first.shape
    judge = read_truth(truth, first)
    fitting = [k for k in dict.fromkeys(ks) if k <= examples]
    if not fitting or not decays:
        raise UndeError(
            f"nothing to search: ks is {list(ks)} and decays {list(decays)} for {examples} training examples: expected "
            "at least one k up to that number, and one decay"
        )
    if queries < 2 * FEWEST_TO_SPLIT:
        raise UndeError(
            f"{console.counted(queries, 'query')} cannot be split in two folds: expected {2 * FEWEST_TO_SPLIT} or more"
        )
    options: dict[str, Any] = {"objective": objective, "epochs": epochs, "lr": lr, "seed": seed}
    settings = [Settings(k, float(d), **options) for k, d in product(fitting, dict.fromkeys(decays))]
    for source in sources.values():
        for one in settings:
            one.check(source)
    check_queries(first)
    folds = crossfit_folds(judge.models, queries, seed)
    keys = [(damping, None) for damping in sources]
    keys += [(damping, one) for damping in sources for one in settings]
    learned = {key: _Learned() for key in keys}
    masks = {of_query.tobytes(): of_query for _, of_query in folds}
    with console.progress("searching", len(sources) * (1 + len(masks)), unit="fits") as advance:
        for damping, source in sources.items():
            data = Contributions(source)
            for held_out in (None, *masks.values()):
                wanted = np.arange(queries) if held_out is None else np.flatnonzero(~held_out)
                problems = [WeightProblem(data, torch.from_numpy(wanted), s.k, objective) for s in settings]
                weights = [torch.ones(data.groups), *(f.weights.float() for f in fit(problems, settings))]
                kept = _judge(data, judge, weights)
                for one, w, values in zip((None, *settings), weights, kept):
                    learned[damping, one].add(held_out, w, values)
                advance(1)
    digests = origins(first.query_digests)
    rated = [
        SearchCandidate(
            damping,
            None if one is None else one.k,
            None if one is None else one.weight_decay,
            float(np.nanmean(judge.rate(learned[damping, one].kept[None]))),
            _weights(learned[damping, one].weights, sources[damping], digests, one, judge.measure),
        )
        for damping, one in keys
    ]
    rated.sort(key=lambda c: -c.value)
    with_, without = ([c for c in rated if (c.k is None) == plain] for plain in (False, True))
    estimates = [
        _crossfit(judge, {key: learned[key] for key in keys if (key[1] is None) == plain}, folds, seed)
        for plain in (False, True)
    ]
    return WeightSearch(with_[0], with_, without, judge.measure, *estimates)


def _sources(scores: Any, dampings: Any) -> dict[Any, Any]:
    """Scores by damping, all of the same queries, examples and groups."""
    if callable(scores):
        by_damping = {d: scores(d) for d in (DAMPINGS if dampings is None else dampings)}
    elif isinstance(scores, Mapping):
        by_damping = dict(scores)
    elif dampings is None:
        by_damping = {None: scores}
    elif callable(dampings):
        by_damping = {None: scores, **{d: dampings(d) for d in DAMPINGS}}
    elif isinstance(dampings, Mapping):
        known = any(scores is other for other in dampings.values())
        by_damping = {**({} if known else {None: scores}), **dampings}
    else:
        raise UndeError(
            f"dampings is {dampings!r}: expected {{damping: scores}} or a function damping → scores, such as lambda d: "
            "index.score(queries, unde.methods.TRAK(damping=d))"
        )
    if not by_damping:
        raise UndeError("there are no scores: expected those of at least one damping")
    checked = {d: check_scores(s) for d, s in by_damping.items()}
    first = next(iter(checked.values()))
    for d, source in checked.items():
        if source.shape != first.shape or source.groups != first.groups:
            raise UndeError(
                f"scores of damping {d} are {tuple(source.shape)} with {len(source.groups)} groups: expected "
                f"{tuple(first.shape)} and the same {len(first.groups)} groups for all"
            )
    return checked


class _Learned:
    """What one setting gave: weights from all queries, and what is kept of the scores by the fold held out."""

    def __init__(self) -> None:
        self.kept: dict[bytes | None, np.ndarray] = {}
        self.weights = torch.empty(0)

    def add(self, held_out: np.ndarray | None, weights: Tensor, kept: np.ndarray) -> None:
        if held_out is None:
            self.weights = weights
        self.kept[None if held_out is None else held_out.tobytes()] = kept


def _judge(data: Contributions, judge: Truth, weights: Sequence[Tensor]) -> list[np.ndarray]:
    """What the truth needs of the scores of all queries under each of the weights."""
    parts: list[list[np.ndarray]] = [[] for _ in weights]
    everything = torch.arange(data.queries)
    for span, scores in data.scores("judging", everything, weights, 0):
        for part, total in zip(parts, scores):
            part.append(judge.keep(total.cpu().numpy(), np.arange(data.queries)[span.places]))
    return [np.concatenate(part, axis=-1) for part in parts]


def _crossfit(
    judge: Truth, learned: Mapping[Any, _Learned], folds: Sequence[tuple[np.ndarray, np.ndarray]], seed: int
) -> Estimate:
    """The measure of candidates that are chosen anew for each fold, on other queries and models."""
    out = np.full_like(next(iter(learned.values())).kept[None], np.nan)
    for models, queries in folds:
        key = queries.tobytes()
        values = [np.nanmean(judge.rate(one.kept[key], ~queries, ~models)) for one in learned.values()]
        chosen = list(learned.values())[int(np.argmax(values))]
        judge.fill(out, chosen.kept[key], queries, models)
    return judge.estimate(out, seed)


def _weights(values: Tensor, source: Any, digests: list[str], one: Settings | None, measure: str) -> Weights:
    record: dict[str, Any] = {"method": source.method.name, "scores": source.provenance}
    if one is not None:
        record |= {"how": f"search by {measure}", "k": one.k, "weight_decay": one.weight_decay}
        record |= {"solver": one.solver, "epochs": one.epochs, "lr": one.lr, "seed": one.seed}
    return Weights(values, source.groups, digests, record)
