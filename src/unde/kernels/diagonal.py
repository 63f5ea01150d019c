"""K = I (TracIn), and the metric of an Adam-like optimizer from stored features, K = diag(mean g²)^−1/2.

A step of Adam divides gradients by the root of their second moments, so inner products are taken in the metric v^−1/2.
Columns without gradients get 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.kernels.base import (
    BoundKernel,
    FeatureLayout,
    Fitted,
    KernelSource,
    Moments,
    Needs,
    PerParameterKernel,
    Round,
    chunks,
    meta_tensor,
)
from unde.kernels.precision import cast_if_in_range, round_to, zeros


@dataclass(frozen=True)
class Identity:
    fisher: str = "empirical"

    def bind(self, sizes: FeatureLayout) -> BoundKernel:
        return _BoundIdentity(sizes)


class _BoundIdentity(PerParameterKernel):
    @property
    def key(self) -> str:
        return "identity"

    def fit(self, moments: Moments, source: KernelSource) -> Fitted:
        return FittedIdentity(source)


class FittedIdentity(Fitted):
    def apply(self, rows: Tensor) -> Tensor:
        return rows


@dataclass(frozen=True)
class Diagonal:
    fisher: str = "empirical"

    def bind(self, sizes: FeatureLayout) -> BoundKernel:
        return _BoundDiagonal(sizes)


class _BoundDiagonal(PerParameterKernel):
    @property
    def key(self) -> str:
        return "diagonal"

    @property
    def rounds(self) -> Sequence[Round]:
        return [Round("squares", len(self.sizes.runs()), self._job)]

    def _job(self, source: KernelSource, i: int, before: Moments) -> Moments:
        total = zeros(self.sizes.width, device=source.device)
        for phi in chunks(source, self.sizes.runs()[i]):
            total += phi.to(total, copy=True).square_().sum(0)
            del phi  # before the next is read
        return {"squares": total}

    def fit(self, moments: Moments, source: KernelSource) -> Fitted:
        mean = moments["squares"] * (self.sizes.labels / self.sizes.examples)
        if not float(mean.sum()) < float("inf"):
            raise UndeError(
                "the second moments of the features are NaN or infinite: some features are not finite, or too large to "
                "square. Rebuild the index with on_bad='skip', or rescale the loss"
            )
        scale = torch.where(mean > 0, mean.rsqrt(), 0.0)
        return FittedDiagonal(source, cast_if_in_range(scale, self.sizes.dtype, source.device))

    def needs(self) -> Needs:
        return Needs(moments={"squares": meta_tensor(self.sizes.width)})


@dataclass(frozen=True)
class FittedDiagonal(Fitted):
    scale: Tensor

    def apply(self, rows: Tensor) -> Tensor:
        return round_to(rows.to(self.scale.device) * self.scale, rows)  # in float64 where the scale is
