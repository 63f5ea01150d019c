"""Hubs, training examples that score high for most queries, and other properties of scores that weights change.

Top-k promotes the groups that hubs live in. `divide_hubs` takes them out while weights are learned: each training
example is divided by the size of its own scores,

    s_qn / r_n,     r_n = RMS over the queries of the unweighted s_qn, plus 0.001 · median(r).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unde.devices import put
from unde.weights.contributions import Contributions, ResolvedScores
from unde.weights.weights import Weights

FLOOR = 1e-3  # of the median size


@dataclass(frozen=True, eq=False)
class DividedScores:
    """Scores divided by a number for each training example."""

    source: ResolvedScores
    size: Tensor  # (N,)

    def __getattr__(self, name: str) -> Any:  # groups, shape, method, digests, provenance, memory
        if name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        for train, block in self.source.stream(queries):
            yield train, block / self.size[train, None].to(block)

    def contributions(self, queries: slice) -> Tensor:
        found = self.source.contributions(queries)
        return found / put(self.size[:, None], found.device)

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        size = self.size[train].to(linear)
        return self.source.finish(linear * size, weights, queries, train) / size


def divide_hubs(source: ResolvedScores) -> DividedScores:
    """Divide scores by the size r_n of those of each training example, so that all count alike.

    >>> from unde.scoring import from_arrays
    >>> divide_hubs(from_arrays([[1.0, 30.0, 2.0], [1.0, 40.0, 2.0]])).contributions(slice(0, 1))[0, :, 0]
    tensor([0.9980, 0.8485, 0.9990])
    """
    size = (squares(Contributions(source), [torch.ones(len(source.groups))])[0] / source.shape[0]).sqrt()
    size = size + FLOOR * size.median()
    return DividedScores(source, torch.where(size > 0, size, 1.0).float())


def squares(data: Contributions, weights: list[Tensor]) -> Tensor:
    """(c, N) sums over the queries of squared final scores under each of the weights."""
    total = torch.zeros(len(weights), data.examples, dtype=torch.float64)
    for _, scores in data.scores("scoring", torch.arange(data.queries), weights, 0):
        total += torch.stack([put(s, s.device, torch.float64).square().sum(0) for s in scores]).cpu()
    return total


def describe(source: ResolvedScores, weights: Tensor) -> dict[str, float]:
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


def effect_in_words(source: ResolvedScores, weights: Weights) -> str:
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
