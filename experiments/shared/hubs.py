"""Hubs, training examples that score high for most queries, divided out of scores.

Top-k promotes the groups that hubs live in. Here each training example is divided by the size of its own scores,

    s_qn / r_n,     r_n = RMS over the queries of the unweighted s_qn, plus 0.001 · median(r).
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
from unde.weights.retrieval import squares

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
