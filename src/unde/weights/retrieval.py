"""Weights from perturbed training examples: Algorithm 1 with the copies as queries.

Copies that are too easy to find among the training examples teach nothing, hopeless ones teach noise: the strength is
searched until the unweighted method finds a target share of them.

Identity is not influence: groups that tell examples apart need not be those that tell what a model learned from them,
so these weights can harm, and only retrained models tell. `describe` tells what any weights make of scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unde.devices import put
from unde.scoring.base import Scores
from unde.weights.contributions import Contributions
from unde.weights.learn import Settings, fit
from unde.weights.objective import WeightProblem
from unde.weights.weights import Weights

TARGET = 0.25  # the share that the unweighted method should find


class Copies:
    """Scores of perturbed copies, and of which training example each is a copy.

    `content` (N,) numbers the training examples by what they hold: equal examples have one number, and finding any of
    them is finding the original.
    """

    def __init__(self, scores: Scores, originals: Tensor, content: Tensor) -> None:
        self.scores, self.originals, self.content = scores, originals, content  # (Q, N), (Q,), (N,)
        self.data = Contributions(scores)

    def retrieved(self, weights: Tensor | None = None) -> Tensor:
        """(Q,) bool: whether the original scores higher than all that is not equal to it."""
        data, hits = self.data, torch.empty(self.data.queries, dtype=torch.bool)
        w = torch.ones(data.groups) if weights is None else weights
        for span, (scores,) in data.scores("finding", torch.arange(data.queries), [w], 16 * data.examples):
            rows = self.originals[span.places][:, None]
            original = scores.gather(1, put(rows, scores.device))[:, 0]
            twins = put(self.content[rows] == self.content, scores.device)
            hits[span.places] = (original > scores.masked_fill_(twins, -math.inf).amax(1)).cpu()
        return hits

    def learn_top(self, seed: int = 0) -> Tensor:
        """(M,) weights by Algorithm 1 with the copies as queries, whose originals it is not told."""
        settings = Settings(seed=seed).with_default_k(self.data.examples)
        problem = WeightProblem(self.data, torch.arange(self.data.queries), settings.k, settings.objective)
        return fit([problem], [settings])[0].weights.float()


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


# --- what weights make of scores ------------------------------------------------------------------------


def squares(data: Contributions, weights: list[Tensor]) -> Tensor:
    """(c, N) sums over the queries of squared final scores under each of the weights."""
    total = torch.zeros(len(weights), data.examples, dtype=torch.float64)
    for _, scores in data.scores("scoring", torch.arange(data.queries), weights, 0):
        total += torch.stack([put(s, s.device, torch.float64).square().sum(0) for s in scores]).cpu()
    return total


def describe(source: Scores, weights: Tensor) -> dict[str, float]:
    """What weights make of scores.

    groups: the effective number of groups, (Σ_j a_j)² / Σ_j a_j² with a_j = w_j ‖C_j‖. examples: the effective number
    of training examples that carry the squared scores, counted alike; few are hubs. cancellation:
    ‖Σ_j w_j C_j‖ / Σ_j a_j, what is left of the groups when they are added up.
    """
    data = Contributions(source)
    size, total = torch.zeros(data.groups, dtype=torch.float64), 0.0
    for span, blocks in data.sweep("sizes of groups", torch.arange(data.queries), 0):
        for _, block in blocks:
            wanted = block[span.wanted.to(block.device)]
            size += wanted.square().sum((0, 1)).cpu().double()
            total += float((wanted @ weights.to(block)).square().sum())
    parts = weights.double() * size.sqrt()
    carried = squares(data, [weights])[0]
    return {
        "groups": _effective_number(parts),
        "examples": _effective_number(carried),
        "cancellation": total**0.5 / max(float(parts.sum()), 1e-300),
    }


def effect_in_words(source: Scores, weights: Weights) -> str:
    """What weights do to the scores that they were learned from, in words; recorded in their provenance."""
    before, after = (describe(source, w) for w in (torch.ones(len(weights)), weights.values))
    weights.provenance["effect"] = {"unweighted": before, "weighted": after}
    return (
        f"{before['groups']:.1f} → {after['groups']:.1f} of {len(weights)} groups count; "
        f"{before['examples']:.0f} → {after['examples']:.0f} of {source.shape[1]:,} examples carry the scores; "
        f"groups cancel to {before['cancellation']:.2f} → {after['cancellation']:.2f} of their size"
    )


def _effective_number(parts: Tensor) -> float:
    """(Σ a)² / Σ a²: n for n equal parts.

    >>> _effective_number(torch.tensor([1.0, 1.0, 0.0]))
    2.0
    """
    return float(parts.sum() ** 2 / parts.square().sum().clamp(min=1e-300))
