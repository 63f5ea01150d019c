"""Objectives for weights without labels, beside the one of `index.learn_weights`: hubs divided out, and self-retrieval.

Top-k promotes the groups that hubs live in, training examples that score high for most queries. `divide_hubs` divides
each training example by the size of its own scores,

    s_qn / r_n,     r_n = RMS over the queries of the unweighted s_qn, plus 0.001 · median(r).

Self-retrieval needs no k: of a perturbed copy q′ of training example n the truth is known, n. It maximises over w ≥ 0

    mean over copies of  score(q′, n; w) / ‖scores(q′, ·; w)‖

(the paper's supervised loss, app. C.4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unde.devices import put
from unde.scoring.base import Scores
from unde.weights.contributions import Contributions
from unde.weights.learn import ADAMW, FIXED_POINT, WEIGHT_DECAY, Settings, fit
from unde.weights.objective import WeightProblem
from unde.weights.retrieval import Copies, squares

FLOOR = 1e-3  # of the median size


@dataclass(frozen=True, eq=False)
class DividedScores:
    """Scores divided by a number for each training example."""

    source: Scores
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


def divide_hubs(source: Scores) -> DividedScores:
    """Divide scores by the size r_n of those of each training example, so that all count alike.

    >>> from unde.scoring import from_arrays
    >>> divide_hubs(from_arrays([[1.0, 30.0, 2.0], [1.0, 40.0, 2.0]])).contributions(slice(0, 1))[0, :, 0]
    tensor([0.9980, 0.8485, 0.9990])
    """
    size = (squares(Contributions(source), [torch.ones(len(source.groups))])[0] / source.shape[0]).sqrt()
    size = size + FLOOR * size.median()
    return DividedScores(source, torch.where(size > 0, size, 1.0).float())


def retrieval_objective(copies: Copies, weights: Tensor) -> Tensor:
    """(Q,): the score of the original over the norm of all."""
    return _problem(copies).values(weights).double()


def learn_retrieval(copies: Copies, seed: int = 0) -> Tensor:
    """(M,) weights that maximise the mean objective less the solver's pull towards uniform weights."""
    solver = FIXED_POINT if copies.scores.method.linear else ADAMW
    settings = Settings(1, WEIGHT_DECAY[solver], "supervised", solver, seed=seed)
    return fit([_problem(copies)], [settings])[0].weights.float()


def _problem(copies: Copies) -> WeightProblem:
    everything = torch.arange(copies.data.queries)
    return WeightProblem(copies.data, everything, 1, "supervised", copies.originals)
