"""Gaussian noise on the contributions, for the study of robustness."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1024  # training examples that share a random stream


def spread(blocks: Iterable[Tensor]) -> Tensor:
    """σ_j, the standard deviation of each group over all query-training pairs of the (q, n, M) blocks.

    >>> spread([torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[[2.0], [6.0]]])])
    tensor([1.8708], dtype=torch.float64)
    """
    count, mean, squares = 0, torch.zeros(()), torch.zeros(())
    for block in blocks:
        for rows in block:  # one query at a time: the double precision copy stays small
            variance, centre = torch.var_mean(rows.double().cpu(), dim=0, correction=0)  # (M,)
            shift, total = centre - mean, count + len(rows)
            # Pooled second moments (Chan, Golub, LeVeque): exact, and stable if the mean is large.
            squares = squares + len(rows) * variance + shift**2 * (count * len(rows) / total)
            mean = mean + shift * (len(rows) / total)
            count = total
    return (squares / max(count, 1)).sqrt()


@dataclass(frozen=True)
class Noise:
    """Noise of standard deviation s·σ_j, one fixed draw for each (query, training example, group).

    The draw depends on the seed and on the pair only, so it is the same in every epoch and for every way of
    cutting the data into blocks.
    """

    deviation: Tensor  # (M,) s·σ_j
    seed: int

    def added(self, block: Tensor, queries: slice, train: slice) -> Tensor:
        """`block` (q, n, M) of the given pairs, plus its noise."""
        noisy = block.clone()
        scale = self.deviation.to(block)
        for row, query in enumerate(range(queries.start, queries.stop)):
            noisy[row] += scale * self._draw(query, train).to(block)
        return noisy

    def _draw(self, query: int, train: slice) -> Tensor:
        """Standard normal numbers for a query and some training examples: (n, M)."""
        first, last = train.start // _CHUNK, (train.stop - 1) // _CHUNK
        shape = (_CHUNK, len(self.deviation))
        chunks = [
            np.random.default_rng([self.seed, query, chunk]).standard_normal(shape, dtype=np.float32)
            for chunk in range(first, last + 1)
        ]
        offset = train.start - first * _CHUNK
        return torch.from_numpy(np.concatenate(chunks)[offset : offset + train.stop - train.start])
