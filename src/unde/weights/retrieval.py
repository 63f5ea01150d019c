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
are; weights that fitted what a strong perturbation does to gradients make them harder to find. So weights must
raise the objective on held-out copies of the searched strength, and must not lower it on weak ones, both judged by a
paired t statistic; else they are refused and stay uniform.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unde.weights.contributions import Contributions
from unde.weights.learn import Settings, fit
from unde.weights.problem import Problem
from unde.weights.source import Source

TARGET = 0.25  # the share that the unweighted method should find
STEPS = 5  # strengths tried at most
DECAYS = (0.1, 1.0, 10.0)  # λ′ to choose from
SURE = 1.65  # t beyond which a gain, or a loss, is taken for real (95 %, one side)


class Copies:
    """Scores of perturbed copies, and of which training example each is a copy.

    `content` (N,) numbers the training examples by what they hold: equal examples have one number, and finding any of
    them is finding the original.
    """

    def __init__(self, scores: Source, originals: Tensor, content: Tensor) -> None:
        self.scores, self.originals, self.content = scores, originals, content  # (Q, N), (Q,), (N,)
        self._data = Contributions(scores)
        everything = torch.arange(self._data.queries)
        self._problem = Problem(self._data, everything, 1, "supervised", originals)

    def found(self, weights: Tensor | None = None) -> Tensor:
        """(Q,) bool: whether the original scores higher than all that is not equal to it."""
        w, finish = self._weights(weights), self.scores.finish
        own, best = torch.empty(self._data.queries), torch.full((self._data.queries,), -math.inf)
        for span, blocks in self._data.sweep("finding", self._problem.queries, 12 * self._data.examples):
            rows = self.originals[span.places]
            for train, c in blocks:
                scores = finish(c @ w.to(c), w.to(c), span.queries, train).cpu()[span.wanted]  # (q, n)
                here = (rows >= train.start) & (rows < train.stop)
                own[span.places][here] = scores[here, rows[here] - train.start]
                twins = self.content[rows].unsqueeze(1) == self.content[train]
                others = scores.masked_fill(twins, -math.inf).amax(1)
                best[span.places] = torch.maximum(best[span.places], others)
        return own > best

    def objective(self, weights: Tensor | None = None) -> Tensor:
        """(Q,): the score of the original over the norm of all."""
        return self._problem.values(self._weights(weights)).double()

    def learned(self, weight_decay: float, seed: int = 0) -> Tensor:
        """(M,) weights that maximise the mean objective."""
        settings = Settings(1, weight_decay, "supervised", seed=seed)
        if settings.solver_for(self.scores) == "adamw":  # its decay has another scale: it bounds weights
            settings = Settings(1, max(weight_decay, 1.0), "supervised", seed=seed)
        return fit(self._problem, settings).weights.float()

    def _weights(self, weights: Tensor | None) -> Tensor:
        return torch.ones(self._data.groups) if weights is None else weights


@dataclass(frozen=True)
class Search:
    """The strength that was settled on, and every one that was tried with the share found there."""

    strength: float
    tried: list[tuple[float, float]]


def search(share: Callable[[float], float], least: float, most: float, target: float = TARGET) -> Search:
    """The strength at which about `target` of the copies are found, by bisection of its logarithm.

    Already below the target at the least strength: the least. Still above it at the most: the most.

    >>> search(lambda strength: 1 - strength, 0.01, 1.0, target=0.5).strength
    0.5623413251903491
    """
    tried = [(least, share(least))]
    if tried[0][1] <= target or most <= least:
        return Search(least, tried)
    tried.append((most, share(most)))
    if tried[1][1] >= target:
        return Search(most, tried)
    low, high = least, most
    while len(tried) < STEPS:
        middle = math.sqrt(low * high)
        tried.append((middle, share(middle)))
        low, high = (middle, high) if tried[-1][1] > target else (low, middle)
    return Search(min(tried, key=lambda at: (abs(at[1] - target), at[0]))[0], tried)


@dataclass(frozen=True)
class Judged:
    """How one candidate did on copies that it was not learned from."""

    weight_decay: float
    gain: float  # of the mean objective on copies of the searched strength, relative to unweighted
    t: float  # its paired t statistic
    weak_gain: float  # the same on weak copies
    weak_t: float

    @property
    def accepted(self) -> bool:
        return self.t > SURE and self.weak_t > -SURE

    @property
    def why(self) -> str:
        if self.t <= SURE:
            return f"no gain on held-out copies (t = {self.t:.1f})"
        return f"weak copies became harder to find (t = {self.weak_t:.1f})" if not self.accepted else ""


def choose(
    learn: Copies, held_out: Copies, weak: Copies, decays: Sequence[float] = DECAYS, seed: int = 0
) -> tuple[Tensor, Judged | None, list[Judged]]:
    """Weights of the candidate that gains most among those that the guard accepts, or uniform ones (None).

    Candidates differ in the weight decay. `held_out` are copies of the same strength of other examples, `weak` weak
    copies of these.
    """
    weights = [learn.learned(decay, seed) for decay in decays]
    judged = [judge(w, decay, held_out, weak) for w, decay in zip(weights, decays)]
    accepted = [(j.gain, -i) for i, j in enumerate(judged) if j.accepted]
    if not accepted:
        return torch.ones_like(weights[0]), None, judged
    best = -max(accepted)[1]
    return weights[best], judged[best], judged


def judge(weights: Tensor, weight_decay: float, held_out: Copies, weak: Copies) -> Judged:
    gain, t = gain_of(weights, held_out)
    weak_gain, weak_t = (gain, t) if weak is held_out else gain_of(weights, weak)
    return Judged(weight_decay, gain, t, weak_gain, weak_t)


def gain_of(weights: Tensor, copies: Copies) -> tuple[float, float]:
    """The relative gain of the mean objective, and its paired t statistic.

    The gain of each copy is divided by the mean unweighted objective, which may be near 0 for hopeless copies: then it
    is large and says little, and t says so.
    """
    before, after = copies.objective(), copies.objective(weights)
    difference = after - before
    spread = float(difference.std()) / math.sqrt(len(difference))
    mean = float(difference.mean())
    t = 0.0 if mean == 0 else mean / spread if spread > 0 else math.copysign(math.inf, mean)
    size = abs(float(before.mean()))
    return (mean / size if size > 0 else 0.0), t


def record(search_: Search, judged: Sequence[Judged], chosen: Judged | None) -> dict[str, Any]:
    """What happened, ready for JSON."""
    return {
        "strength": search_.strength,
        "search": [{"strength": s, "found": share} for s, share in search_.tried],
        "candidates": [
            {
                "weight_decay": j.weight_decay,
                "gain": j.gain,
                "t": j.t,
                "weak_gain": j.weak_gain,
                "weak_t": j.weak_t,
            }
            for j in judged
        ],
        "weight_decay": None if chosen is None else chosen.weight_decay,
        "accepted": chosen is not None,
        "refused": None if chosen is not None else "; ".join(dict.fromkeys(j.why for j in judged)),
    }
