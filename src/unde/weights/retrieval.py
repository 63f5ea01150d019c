"""Self-retrieval: weights with which a perturbed training example finds itself.

The paper's objective takes the top k of a query for true. Of a perturbed copy q′ of training example n the truth is
known: n. So k goes, and queries go; what is maximised over w ≥ 0 is

    mean over copies of  score(q′, n; w) / ‖scores(q′, ·; w)‖

(the paper's supervised loss, app. C.4). In the signal-plus-noise model of app. A the numerator then estimates the
signal from a pair whose influence is certain, where the top k may be outliers of the noise itself.

What makes it work is how hard the copies are. Too easy, and there is nothing to learn; hopeless, and what is
learned is noise. The strength is searched until the unweighted method finds a target share of them.

What makes it safe is a guard. Copies that were held out show whether weights overfit, not whether hard copies are the
right thing to look at. But weights that found real signal make *weak* copies easier to find too, or leave them as they
are, and so they do with copies of another kind; weights that fitted what one strong perturbation does to gradients
make them harder to find. So weights must raise the objective on held-out copies, and must not lower it on weak
copies nor on those of any other kind, all judged by a paired t statistic; else they are refused. The same guard
judges weights that were learned in other ways, from queries by the paper's objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from unde.weights.contributions import Contributions
from unde.weights.objective import WeightProblem
from unde.weights.protocol import ResolvedScores
from unde.weights.settings import ADAMW, FIXED_POINT, Settings, fit

TARGET = 0.25  # the share that the unweighted method should find
DECAYS = (0.1, 1.0)  # λ′ to choose from
NEARLY = 2 / 3  # of the gain of its own weights that self-retrieval asks of others
SURE = 1.65  # t beyond which a gain, or a loss, is taken for real (95 %, one side)


class Copies:
    """Scores of perturbed copies, and of which training example each is a copy.

    `content` (N,) numbers the training examples by what they hold: equal examples have one number, and finding any of
    them is finding the original.
    """

    def __init__(self, scores: ResolvedScores, originals: Tensor, content: Tensor) -> None:
        self.scores, self.originals, self.content = scores, originals, content  # (Q, N), (Q,), (N,)
        self._data = Contributions(scores)
        everything = torch.arange(self._data.queries)
        self._problem = WeightProblem(self._data, everything, 1, "supervised", originals)

    def retrieved(self, weights: Tensor | None = None) -> Tensor:
        """(Q,) bool: whether the original scores higher than all that is not equal to it."""
        data, hits = self._data, torch.empty(self._data.queries, dtype=torch.bool)
        w = torch.ones(data.groups) if weights is None else weights
        for span, (scores,) in data.scores("finding", self._problem.queries, [w], 16 * data.examples):
            rows = self.originals[span.places][:, None]
            original = scores.gather(1, rows)[:, 0]
            twins = self.content[rows] == self.content
            hits[span.places] = original > scores.masked_fill_(twins, -math.inf).amax(1)
        return hits

    def objective(self, weights: Tensor | None = None) -> Tensor:
        """(Q,): the score of the original over the norm of all."""
        return self._unweighted if weights is None else self._problem.values(weights).double()

    @cached_property
    def _unweighted(self) -> Tensor:
        return self._problem.values(torch.ones(self._data.groups)).double()

    def learn(self, *weight_decays: float, seed: int = 0) -> list[Tensor]:
        """(M,) weights that maximise the mean objective, for each of the decays."""
        settings = [Settings(1, self.decay(d), "supervised", self._solver, seed=seed) for d in weight_decays]
        return [result.weights.float() for result in fit([self._problem] * len(settings), settings)]

    def decay(self, weight_decay: float) -> float:
        """What the solver takes; that of AdamW has another scale, and bounds weights."""
        return max(weight_decay, 1.0) if self._solver == ADAMW else weight_decay

    @property
    def _solver(self) -> str:
        return FIXED_POINT if self.scores.method.linear else ADAMW


@dataclass(frozen=True)
class StrengthSearch:
    """The chosen strength, and the (strength, share) pairs of the search."""

    strength: float
    shares: list[tuple[float, float]]


def search_strength(
    share: Callable[[float], float], least: float, most: float, target: float = TARGET, steps: int = 5
) -> StrengthSearch:
    """The strength at which about `target` of the copies are found, by bisection of its logarithm.

    Already below the target at the least strength: the least. Still above it at the most: the most. At most `steps`
    strengths are tried.
    """
    shares = [(least, share(least))]
    if shares[0][1] <= target or most <= least:
        return StrengthSearch(least, shares)
    shares.append((most, share(most)))
    if shares[1][1] >= target:
        return StrengthSearch(most, shares)
    low, high = least, most
    while len(shares) < steps:
        middle = math.sqrt(low * high)
        shares.append((middle, share(middle)))
        low, high = (middle, high) if shares[-1][1] > target else (low, middle)
    return StrengthSearch(min(shares, key=lambda at: (abs(at[1] - target), at[0]))[0], shares)


@dataclass(frozen=True)
class Trial:
    """Held-out copies of one kind of perturbation: of the searched strength, and weak ones."""

    kind: str
    search: StrengthSearch
    hard: Copies
    weak: Copies  # the same object where the searched strength is the least

    def gains(self, weights: Tensor) -> Gains:
        gain, t = gain_of(weights, self.hard)
        weak_gain, weak_t = (gain, t) if self.weak is self.hard else gain_of(weights, self.weak)
        return Gains(self.kind, gain, t, weak_gain, weak_t)


@dataclass(frozen=True)
class Gains:
    """Of the mean objective, relative to unweighted, with their paired t statistics."""

    kind: str
    gain: float
    t: float
    weak_gain: float
    weak_t: float


@dataclass(frozen=True, eq=False)
class JudgedWeights:
    """One candidate: what it is, its weights, and what they do to copies of every kind."""

    candidate: dict[str, Any]
    weights: Tensor  # (M,)
    gains: list[Gains]

    @property
    def gain(self) -> float:
        """What candidates are compared by: the least over kinds."""
        return min(g.gain for g in self.gains)

    @property
    def objection(self) -> str | None:
        """Why the guard refuses it, or None."""
        for g in self.gains:
            if g.t < -SURE:
                return f"held-out copies ({g.kind}) became harder to find (t = {g.t:.1f})"
            if g.weak_t < -SURE:
                return f"weak copies ({g.kind}) became harder to find (t = {g.weak_t:.1f})"
        best = max(g.t for g in self.gains)
        return None if best > SURE else f"no sure gain on held-out copies (t = {best:.1f})"

    def as_dict(self) -> dict[str, Any]:
        return {**self.candidate, "gains": [asdict(g) for g in self.gains], "refused": self.objection}


def learn_candidates(learn: Mapping[str, Copies], seed: int = 0) -> list[tuple[dict[str, Any], Tensor]]:
    """Weights learned from copies of each kind, and the mean over kinds, for every weight decay."""
    candidates: list[tuple[dict[str, Any], Tensor]] = []
    decays = list(dict.fromkeys(copies.decay(d) for d in DECAYS for copies in learn.values()))
    learned = {kind: copies.learn(*decays, seed=seed) for kind, copies in learn.items()}
    for i, decay in enumerate(decays):
        by_kind = {kind: weights[i] for kind, weights in learned.items()}
        candidates += [({"learned from": kind, "weight_decay": decay}, w) for kind, w in by_kind.items()]
        if len(by_kind) > 1:
            mean = torch.stack(list(by_kind.values())).mean(0)
            candidates.append(({"learned from": " and ".join(by_kind), "weight_decay": decay}, mean))
    return candidates


def judge_weights(
    candidates: Iterable[tuple[dict[str, Any], Tensor]], trials: Sequence[Trial]
) -> list[JudgedWeights]:
    return [JudgedWeights(label, w, [trial.gains(w) for trial in trials]) for label, w in candidates]


def best_accepted(judged: Sequence[JudgedWeights], least: float = 0.0) -> JudgedWeights | None:
    """The candidate that gains most of those that the guard accepts and that gain `least`; None if there is none."""
    accepted = [j for j in judged if j.objection is None and j.gain >= least]
    return max(accepted, key=lambda j: j.gain, default=None)


def best_confirmed(
    judged: Sequence[JudgedWeights], from_copies: Sequence[JudgedWeights]
) -> JudgedWeights | None:
    """The best candidate learned in another way, if it gains nearly as much as weights learned `from_copies`.

    That the guard accepts weights is not enough where much more is to be gained: weights that find copies somewhat
    better can still be far from those that find them best, and predict retrained models worse than none.
    """
    reachable = best_accepted(from_copies)
    return best_accepted(judged, 0.0 if reachable is None else NEARLY * reachable.gain)


def gain_of(weights: Tensor, copies: Copies) -> tuple[float, float]:
    """The gain of the mean objective relative to its unweighted size, and its paired t statistic.

    The size may be near 0 for hopeless copies: then the gain is large and says little, and t says so.
    """
    before, after = copies.objective(), copies.objective(weights)
    difference = after - before
    mean, spread = float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))
    t = 0.0 if mean == 0 else mean / spread if spread > 0 else math.copysign(math.inf, mean)
    size = abs(float(before.mean()))
    return (mean / size if size > 0 else 0.0), t


class SelfRetrieval(Protocol):
    """Perturbed training examples under one method: what weights are judged by."""

    @property
    def trials(self) -> Sequence[Trial]: ...  # held-out copies of each kind of perturbation
    @property
    def candidates(self) -> Sequence[JudgedWeights]: ...  # weights learned from copies, judged by the trials


class Judge(Protocol):
    """What tells good weights from bad ones, e.g. an `unde.Index` opened with its model and training data."""

    def self_retrieval(self, scores: Any) -> SelfRetrieval:
        """Run self-retrieval under the method and groups of `scores`; NotRetrievable if it cannot be run."""
        ...
