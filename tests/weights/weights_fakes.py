"""Scores for the tests of weight learning: in memory, but handed out in blocks as an index would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class FakeMethod:
    name: str = "fake"
    linear: bool = True


@dataclass
class FakeScores:
    """`rows` training examples to a block, and a record of what was asked for."""

    values: Tensor  # (Q, N, M)
    memory: int = 2**30
    rows: int = 10**9
    method: FakeMethod = field(default_factory=FakeMethod)
    provenance: dict = field(default_factory=lambda: {"index": "abc"})
    largest: int = 0  # bytes of the largest block handed out
    passes: int = 0

    @property
    def groups(self) -> list[str]:
        return [f"g{j}" for j in range(self.values.shape[2])]

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def query_digests(self) -> list[str]:
        return [f"q{i}" for i in range(len(self.values))]

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        self.passes += 1
        for start in range(0, self.shape[1], self.rows):
            train = slice(start, min(start + self.rows, self.shape[1]))
            yield train, self._noted(self.values[queries, train])

    def contributions(self, queries: slice) -> Tensor:
        return self._noted(self.values[queries])

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        return linear

    def _noted(self, block: Tensor) -> Tensor:
        self.largest = max(self.largest, 4 * block.numel())
        return block.clone()  # what is done to a block must not reach the source


class CosineScores(FakeScores):
    """Divides by norms that depend on the weights, as a cosine does."""

    def __init__(self, values: Tensor, **options) -> None:
        super().__init__(values, method=FakeMethod("fake-cosine", linear=False), **options)
        generator = torch.Generator().manual_seed(7)
        self.query_squares = torch.rand(values.shape[0], values.shape[2], generator=generator) + 0.1
        self.train_squares = torch.rand(values.shape[1], values.shape[2], generator=generator) + 0.1

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        q = self.query_squares[queries] @ weights**2  # (q,)
        n = self.train_squares[train] @ torch.ones_like(weights)  # (n,)
        return linear / (q[:, None] * n).sqrt()


def random_scores(queries=12, examples=60, groups=5, seed=0) -> Tensor:
    """Contributions with some signal, groups of very different sizes and correlated noise: (Q, N, M)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    influence = normal(queries, examples, 1).relu() ** 3
    size = torch.exp(1.5 * normal(groups))
    shared = normal(queries, examples, 1) * normal(groups)
    contributions = influence * normal(groups).abs() + normal(queries, examples, groups) + 0.5 * shared
    return contributions * size * torch.exp(normal(queries, 1, 1))


def signal_model(queries=40, examples=400, groups=8, seed=0) -> tuple[Tensor, Tensor]:
    """The paper's appendix A: C_j = α_j I + ε_j. Returns (Q, N, M) and the optimum α_j/σ_j², of mean 1.

    Ten training examples of each query have influence 3, strong enough for the top 10 to be these.
    """
    generator = torch.Generator().manual_seed(seed)
    alpha = 0.5 + torch.rand(groups, generator=generator)
    sigma = torch.exp(torch.linspace(-1.0, 1.0, groups))[torch.randperm(groups, generator=generator)]
    influence = torch.zeros(queries, examples)
    influence[:, :10] = 3.0
    noise = sigma * torch.randn(queries, examples, groups, generator=generator)
    optimum = alpha / sigma**2
    return alpha * influence[..., None] + noise, optimum / optimum.mean()
