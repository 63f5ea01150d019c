"""What a solver is given and what it hands back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.weights.contributions import Contributions
from unde.weights.objective import objective


@dataclass(frozen=True)
class Problem:
    """Find the weights that maximise the mean objective of some queries."""

    data: Contributions
    queries: Tensor  # (Q',) sorted indices of the queries to learn from
    k: int
    loss: str
    positives: Tensor | None = None  # (Q,) for "supervised": the training example of each query

    def values(self, weights: Tensor) -> Tensor:
        """The objective of each of the queries at `weights`: (Q',)."""
        data, values = self.data, torch.empty(len(self.queries))
        for span in data.spans("scoring", self.queries, 16 * data.examples):
            (scores,) = data.scores(span, [weights])  # (q, N)
            values[span.places] = objective(scores, self.k, self.loss, self.positives_of(span.places))
        return values

    def positives_of(self, places: slice) -> Tensor | None:
        """The positives of some of the queries, by their places in `queries`."""
        return None if self.positives is None else self.positives[self.queries[places]]


@dataclass(frozen=True)
class Fit:
    """Weights of mean one, and how the objective went: its value unweighted, then after each pass."""

    weights: Tensor  # (M,) float64
    unweighted: float
    curve: list[float]
    converged: bool | None = None  # None if the solver runs for a fixed number of steps


def nothing_to_learn() -> UndeError:
    """The error for contributions that are all zero."""
    return UndeError(
        "all contributions are zero, so there is nothing to learn weights from: expected scores that differ "
        "between training examples. Check that queries and index come from the same model and that its loss "
        "has a gradient"
    )
