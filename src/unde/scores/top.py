"""The best training examples of queries: a stable top-k, and how two of them merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Top:
    """The k best training examples of each query, best first; of equal scores the earlier example first."""

    indices: Tensor  # (Q, k)
    values: Tensor  # (Q, k)
    ids: list[list[Any]]  # (Q, k), the user's ids if the index has them


class Best:
    """The k best so far, of scores that come in blocks of training examples, in order, from the `first` on."""

    def __init__(self, queries: int, k: int, largest: bool, first: int = 0) -> None:
        self.k, self.largest, self.first = k, largest, first
        self.worst = -torch.inf if largest else torch.inf
        self.values, self.indices = torch.empty(queries, k), torch.empty(queries, k, dtype=torch.long)

    def see(self, queries: slice, start: int, scores: Tensor) -> None:
        """Scores (q, n) of the training examples from `start` on."""
        best, at = stable_top(scores, min(self.k, scores.shape[1]), self.largest)
        self.merge(queries, start, scores.shape[1], best, at + start)

    def merge(self, queries: slice, start: int, count: int, values: Tensor, indices: Tensor) -> None:
        """The best of `count` training examples from `start` on, which follow those seen so far."""
        have, keep = min(self.k, start - self.first), min(self.k, start - self.first + count)
        best = torch.cat([self.values[queries, :have], values], 1)
        number = torch.cat([self.indices[queries, :have], indices], 1)
        self.values[queries, :keep], at = stable_top(best, keep, self.largest)
        self.indices[queries, :keep] = number.gather(1, at)

    def top(self, ids: Sequence[Any] | None) -> Top:
        named = self.indices.tolist()
        if ids is not None:
            named = [[ids[i] for i in row] for row in named]
        return Top(self.indices, self.values, named)


def stable_top(values: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """As topk, but of equal values the earlier ones, in their order.

    >>> stable_top(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), 2, largest=True)[1]
    tensor([[1, 2]])
    """
    best, at = values.topk(k, largest=largest)
    last = best[:, -1:]
    beaten_or_equal = (values >= last) if largest else (values <= last)
    tied = (beaten_or_equal.sum(1) > k).nonzero()[:, 0]  # rows where topk chose among equals
    if len(tied):
        at[tied] = values[tied].sort(stable=True, dim=1, descending=largest).indices[:, :k]
    at = at.sort(1).values
    best, order = values.gather(1, at).sort(stable=True, dim=1, descending=largest)
    return best, at.gather(1, order)
