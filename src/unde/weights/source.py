"""What weight learning needs to know of scores, and scores that are already in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from unde.errors import UndeError


class Method(Protocol):
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
    def method(self) -> Method: ...
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


@dataclass(frozen=True)
class Additive:
    """A method whose scores are plain sums over groups."""

    name: str = "additive"
    linear: bool = True


class TensorScores:
    """Additive group-resolved scores held as one (Q, N, M) tensor, from this package or any other.

    >>> import torch
    >>> scores = TensorScores(torch.randn(8, 100, 3), groups=["embed", "block", "head"])
    >>> scores.shape
    (8, 100)
    """

    def __init__(self, values: Tensor, groups: Sequence[str], memory: int = 2**30) -> None:
        if values.ndim != 3 or values.shape[2] != len(groups):
            raise UndeError(
                f"contributions have shape {tuple(values.shape)}: expected (queries, training examples, "
                f"{len(groups)}), since {len(groups)} group names were given"
            )
        self.values = values.float()  # (Q, N, M)
        self.groups = list(groups)
        self.memory = memory
        self.method: Method = Additive()
        self.provenance: dict[str, Any] = {}

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def query_digests(self) -> list[str]:
        rows = self.values.cpu().contiguous().numpy()
        return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in rows]

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self.shape[1]), self.values[queries]

    def contributions(self, queries: slice) -> Tensor:
        return self.values[queries]

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        return linear
