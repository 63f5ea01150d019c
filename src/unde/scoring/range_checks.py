"""Scores within the range of float32: those that are not are refused, not handed on as NaN, infinity or zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from unde.errors import UndeError

TINY = torch.finfo(torch.float32).tiny
HUGE = 1e38  # sums whose bound is below this are finite
_ORDINARY = 2.0**-50  # a norm beyond this has a score far above TINY
_WAY_OUT = "the loss by a constant and build again"


class Sizes:
    """The largest size of the scores of each query, of blocks that come one after the other."""

    def __init__(self, queries: int) -> None:
        self.largest = torch.zeros(queries)

    def see(self, queries: slice, scores: Tensor) -> Tensor:
        """The scores (q, …) as they are, if all are finite."""
        if scores.numel():
            each = tuple(range(1, scores.ndim))
            largest = torch.linalg.vector_norm(scores, dim=-1)  # one pass, and enough for ordinary scores
            largest = largest if largest.ndim == 1 else torch.linalg.vector_norm(largest, dim=each[:-1])
            if not (largest.min() > _ORDINARY and largest.max() < math.inf):
                largest = torch.maximum(scores.amax(each), -scores.amin(each))  # NaN if one is
            if not largest.max() < math.inf:
                first = int((~largest.isfinite()).nonzero()[0])
                raise UndeError(
                    f"scores of query {(queries.start or 0) + first} are beyond the range of float32: divide {_WAY_OUT}"
                )
            self.largest[queries] = torch.maximum(self.largest[queries], largest)
        return scores

    @property
    def ordinary(self) -> bool:
        """Whether every query has shown a score that is not lost."""
        return bool((self.largest > _ORDINARY).all())

    def lost(self) -> Tensor:
        """Queries all of whose scores are zero, or too small to have their digits."""
        return (self.largest < TINY).nonzero()[:, 0]


def refuse_lost(lost: Tensor, queries: Tensor, blocks: Iterable[Sequence[Tensor]]) -> None:
    """Refuses queries (C, Q, D) whose scores with `blocks`, (n, D) for each checkpoint, are zero by underflow only."""
    lost = lost[queries[:, lost].any(2).any(0)]  # no gradient, no score
    exact = queries[:, lost].double()
    for block in blocks if len(lost) else ():
        scores = sum(q @ b.double().T for q, b in zip(exact, block))
        assert isinstance(scores, Tensor)
        small = scores.any(1).nonzero()[:, 0]
        if len(small):
            raise below(f"scores of query {int(lost[small[0]])}")


def below(what: str) -> UndeError:
    return UndeError(f"{what} are below the range of float32: multiply {_WAY_OUT}")


def finite(scores: Tensor, what: str) -> Tensor:
    """The same, if all are."""
    if scores.numel() and not torch.stack(torch.aminmax(scores)).isfinite().all():
        raise UndeError(f"{what} are beyond the range of float32: divide {_WAY_OUT}")
    return scores
