"""The objective that weights maximise, the training examples it selects, and the problem that solvers are given.

The paper's self-supervised objective and the variants of its ablation are written to be maximised, i.e. minus the
paper's losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unde.devices import put
from unde.errors import UndeError, unknown
from unde.scoring.blocks import stable_top
from unde.weights.contributions import Contributions

# The numerator is a sum over sides of mean(top-k of side · scores): +1 the proponents, −1 the opponents.
SIDES: dict[str, tuple[int, ...]] = {
    "top-k": (1,),
    "supervised": (),
    "bottom-k": (-1,),
    "top-k-bottom-k": (1, -1),
    "no-norm": (1,),
}
OBJECTIVES = tuple(SIDES)


def objective(scores: Tensor, k: int, name: str = "top-k", positives: Tensor | None = None) -> Tensor:
    """The objective of each query, given its scores over the training set: (..., N) → (...).

    `"top-k"` is the mean of the k largest scores over the norm of all N, the paper's main loss with its sign
    turned; `"bottom-k"` is minus the mean of the k smallest over the norm, `"top-k-bottom-k"` the sum of
    the two, `"no-norm"` the mean of the k largest alone, and `"supervised"` the score of one known positive
    for each query (`positives`, (...) indices) over the norm. A query whose scores are all zero counts 0.

    >>> objective(torch.tensor([3.0, 4.0, 0.0]), k=1)
    tensor(0.8000)
    >>> objective(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]), k=2)
    tensor([0.7000, 0.0000])
    """
    if name not in SIDES:
        raise unknown("objective", name, OBJECTIVES)
    if name != "no-norm":
        scores = normalise(scores)
    if name == "supervised":
        if positives is None:
            raise TypeError("the supervised objective needs positives")
        return scores.gather(-1, positives.to(scores.device)[..., None]).squeeze(-1)
    sides = [(side * scores).topk(k, dim=-1).values.mean(-1) for side in SIDES[name]]
    return torch.stack(sides).sum(0)


def selection(scores: Tensor, ks: Tensor, name: str, positive: int | None = None) -> Tensor:
    """(B, N) coefficients of the mean over the selected scores, with a k for each row of the scores (B, N).

    >>> selection(torch.tensor([[3.0, 4.0, 0.0], [3.0, 4.0, 0.0]]), torch.tensor([1, 2]), "top-k")
    tensor([[0.0000, 1.0000, 0.0000],
            [0.5000, 0.5000, 0.0000]])
    """
    out = torch.zeros_like(scores)
    if name == "supervised":
        out[:, positive] = 1.0
        return out
    for k in ks.unique().tolist():
        rows = put((ks == k).nonzero()[:, 0], scores.device)
        for side in SIDES[name]:
            top = (side * scores[rows]).topk(k, dim=1, sorted=False).indices
            out[rows[:, None], top] += side / k
    return out


def normalise(scores: Tensor) -> Tensor:
    """The scores of each query over their norm, (..., N); all zero if they are.

    >>> normalise(torch.tensor([3e-30, 4e-30]))
    tensor([0.6000, 0.8000])
    """
    # The unit of the scores cancels, so take one in which squares neither overflow nor vanish.
    unit = scores.detach().abs().amax(-1, keepdim=True)  # (..., 1)
    scores = scores / torch.where(unit > 0, unit, 1.0)
    norm = torch.linalg.vector_norm(scores, dim=-1, keepdim=True)  # (..., 1)
    return scores / torch.where(norm > 0, norm, 1.0)


@dataclass(frozen=True)
class WeightProblem:
    """Find the weights that maximise the mean objective of some queries."""

    data: Contributions
    queries: Tensor  # (Q',) sorted indices of the queries to learn from
    k: int
    objective: str
    positives: Tensor | None = None  # (Q,) for "supervised": the training example of each query

    def values(self, weights: Tensor) -> Tensor:
        """The objective of each of the queries at `weights`: (Q',)."""
        values = torch.empty(len(self.queries))
        for span, (scores,) in self.data.scores("scoring", self.queries, [weights], 8 * self.data.examples):
            found = objective(scores, self.k, self.objective, self.positives_at(span.places))
            values[span.places] = found.cpu()
        return values

    def positives_at(self, places: slice) -> Tensor | None:
        """The positives of some of the queries, by their places in `queries`."""
        return None if self.positives is None else self.positives[self.queries[places]]


@dataclass(frozen=True)
class Fit:
    """Weights of mean one, and how the objective went: its value unweighted, then after each pass."""

    weights: Tensor  # (M,) float64
    unweighted: float
    curve: list[float]
    converged: bool | None = None  # None if the solver runs for a fixed number of steps


def zero_contributions_error() -> UndeError:
    return UndeError(
        "all contributions are zero, so there is nothing to learn weights from: expected scores that differ "
        "between training examples. Check that queries and index come from the same model and that its loss "
        "has a gradient"
    )


def select(problem: WeightProblem, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Select the training examples that count for each query at `weights`, while blocks stream.

    Returns their indices, (Q', r) and sorted, and their mean contributions, a (Q', M) in float64: as long as the
    indices stay what they are, the numerator of query q is a_q·w.
    """
    data = problem.data
    supervised = problem.objective == "supervised"
    sides, k = ((1,), 1) if supervised else (SIDES[problem.objective], problem.k)
    indices, means = [], []
    for span, blocks in data.sweep("selecting", problem.queries, 16 * data.groups * k + 12 * data.examples):
        positives = problem.positives_at(span.places)
        tops: dict[int, _TopRows] = {}
        for train, block in blocks:
            wanted = put(span.wanted, block.device)
            if positives is None:
                ranking = torch.bmm(weights.to(block).expand(len(block), 1, -1), block.mT)[
                    wanted, 0
                ]  # (q, n)
            else:  # the known positive comes first, and k is 1
                known = torch.arange(train.start, train.stop) == positives[:, None]
                ranking = put(known, block.device, block.dtype)
            for side in sides:
                top = _TopRows.of(side * ranking, k, train.start, block, wanted)
                tops[side] = top if side not in tops else tops[side].merge(top, k)
        indices.append(torch.cat([tops[side].indices.cpu().sort(1).values for side in sides], dim=1))
        means.append(torch.stack([side * tops[side].rows.cpu().double().mean(1) for side in sides]).sum(0))
    return torch.cat(indices), torch.cat(means)


class _TopRows(NamedTuple):
    """The k training examples of each query that rank highest so far, of equal ones the earlier."""

    ranking: Tensor  # (q, ≤k)
    indices: Tensor  # (q, ≤k)
    rows: Tensor  # (q, ≤k, M) their contributions

    @classmethod
    def of(cls, ranking: Tensor, k: int, start: int, block: Tensor, wanted: Tensor) -> _TopRows:
        ranking, columns = stable_top(ranking, min(k, ranking.shape[1]), largest=True)
        return cls(ranking, columns + start, block[wanted[:, None], columns])

    def merge(self, other: _TopRows, k: int) -> _TopRows:
        ranking, indices, rows = (torch.cat(pair, dim=1) for pair in zip(self, other))
        ranking, keep = stable_top(ranking, min(k, ranking.shape[1]), largest=True)
        return _TopRows(ranking, indices.gather(1, keep), rows.take_along_dim(keep[..., None], dim=1))
