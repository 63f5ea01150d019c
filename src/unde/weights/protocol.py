"""The interface of scores that weights are learned from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor


class ScoringMethod(Protocol):
    """How the scores were made: the name, and whether the final score is the sum of the groups' parts."""

    @property
    def name(self) -> str: ...
    @property
    def linear(self) -> bool: ...


class ResolvedScores(Protocol):
    """Group-resolved scores of Q queries against N training examples over M groups, read in blocks."""

    @property
    def groups(self) -> list[str]: ...  # the M names
    @property
    def shape(self) -> tuple[int, int]: ...  # (Q, N)
    @property
    def method(self) -> ScoringMethod: ...
    @property
    def query_digests(self) -> list[str]: ...  # one for each query
    @property
    def provenance(self) -> dict[str, Any]: ...  # JSON-able; copied into the weights
    @property
    def memory(self) -> int: ...  # budget for blocks, in bytes

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """Blocks over the training examples: (slice of them, (q, n, M) linear contributions)."""
        ...

    def contributions(self, queries: slice) -> Tensor:
        """All of it for some queries: (q, N, M)."""
        ...

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        """Weighted sums (q, n) → final scores (q, n), differentiable in the weights."""
        ...
