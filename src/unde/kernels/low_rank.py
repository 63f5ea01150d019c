"""(ΦᵀΦ + λI)⁻¹ without a matrix of D × D or N × N: by Woodbury's identity, from the leading singular vectors of Φ.

With the leading s² and V (D, t) of ΦᵀΦ, and the mean τ of its other eigenvalues in their place,

    ΦᵀΦ ≈ V diag(s²) Vᵀ + τ (I − V Vᵀ)        K = (I − V diag((s² − τ) / (s² + λ)) Vᵀ) / (λ + τ)

which is exact where t is the rank of Φ (then τ = 0). Else K is off by |1 / (s² + λ) − 1 / (τ + λ)| at most, in norm,
over the other s². Without τ, as LoRIF has it, what varies little would weigh 1 / λ, which is much where λ is small. V
is found by subspace iteration in passes over the stored blocks: Q ← orth(Φᵀ Φ Q) from random directions, some more
than t, then the eigenvectors of Qᵀ ΦᵀΦ Q.

K acts on the query side, ⟨K(w ⊙ g(q)), g(n)⟩, and K g(n) is not stored. Contributions of groups are sums as always,
C_j = ⟨K(1_j ⊙ g(q)), g(n)⟩, but K mixes all columns: M groups take M products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unde.devices import put
from unde.errors import UndeError
from unde.kernels import precision as numbers
from unde.kernels.base import (
    BoundKernel,
    FeatureLayout,
    Fitted,
    KernelSource,
    Moments,
    Needs,
    Round,
    chunks,
    meta_tensor,
)

MORE = 16  # directions beside those asked for, which make the last of these right
PASSES = 3  # of Q ← orth(Φᵀ Φ Q)


@dataclass(frozen=True)
class LowRankGram(BoundKernel):
    sizes: FeatureLayout
    damping: float
    relative: bool
    rank: int  # t, at most

    @property
    def blocks(self) -> Sequence[Sequence[slice]]:
        """All columns, mixed on the query side."""
        return [[slice(0, self.sizes.width)]]

    @property
    def used_rank(self) -> int:
        """t: not more than the rank that Φ can have."""
        return min(self.rank, self.sizes.examples, self.sizes.width)

    @property
    def sketch_rank(self) -> int:
        """Directions of the iteration."""
        return min(self.used_rank + MORE, self.sizes.width)

    @property
    def precision(self) -> torch.dtype:
        """Of products: with relative damping s²/λ is at most D/damping, and K takes differences of that size."""
        comfortable = self.relative and self.sizes.width <= numbers.ILL * self.damping
        return self.sizes.dtype if comfortable else torch.float64

    @property
    def key(self) -> str:
        return f"truncated {self.used_rank} {self.precision}".replace("torch.", "")

    @property
    def rounds(self) -> Sequence[Round]:
        jobs = len(self.sizes.runs())
        spans = [Round(f"span{i}", jobs, self._span, self._orthonormal) for i in range(PASSES)]
        return [*spans, Round("small", jobs, self._small)]

    def _span(self, source: KernelSource, i: int, before: Moments) -> Moments:
        """Φᵀ Φ Q of a run of blocks, and the diagonal of ΦᵀΦ: products in `precision`, summed in float64."""
        basis = put(before["basis"] if before else self._drawn(), source.device, self.precision)
        span = numbers.zeros(self.sizes.width, self.sketch_rank, device=source.device)
        diagonal = numbers.zeros(self.sizes.width, device=source.device)
        for phi in chunks(source, self.sizes.runs()[i]):
            phi = put(phi, source.device, self.precision)
            along = numbers.product(phi, basis)
            span += numbers.product(phi.to(along).T, along).to(span.device)
            diagonal += torch.linalg.vecdot(phi, phi, dim=0).to(span.device)
            del phi, along  # before the next is read
        return {"basis": span, "diagonal": diagonal}

    def _drawn(self) -> Tensor:
        """(D, ·): the same whoever draws it."""
        drawing = torch.Generator().manual_seed(0)
        return torch.randn(self.sizes.width, self.sketch_rank, generator=drawing, dtype=torch.float64)

    def _orthonormal(self, summed: Moments) -> Moments:
        span, diagonal = summed["basis"], summed["diagonal"]
        if not math.isfinite(float(span.norm())):
            raise UndeError(
                "the kernel ΦᵀΦ holds NaN or infinite entries: some features are not finite, or too large to "
                "square. Rebuild the index with on_bad='skip', or rescale the loss"
            )
        return {"basis": torch.linalg.qr(span / (float(span.abs().max()) or 1.0)).Q, "diagonal": diagonal}

    def _small(self, source: KernelSource, i: int, before: Moments) -> Moments:
        """Qᵀ ΦᵀΦ Q of a run of blocks."""
        basis = put(before["basis"], source.device, self.precision)
        small = numbers.zeros(self.sketch_rank, self.sketch_rank, device=source.device)
        for phi in chunks(source, self.sizes.runs()[i]):
            along = numbers.product(put(phi, source.device, self.precision), basis)
            small += numbers.product(along.T, along).to(small.device)
            del phi
        return {"small": small}

    def fit(self, moments: Moments, source: KernelSource) -> Fitted:
        trace = float(moments["diagonal"].sum())
        if trace == 0:
            raise UndeError("all features of the index are zero: has the loss a gradient?")
        lam = numbers.damping_value(self.damping, self.relative, trace / self.sizes.width)
        if lam <= 0:
            raise UndeError(
                "without damping there is no inverse from some singular vectors alone: raise the damping, or use "
                "form='primal' or 'dual'"
            )
        values, vectors = torch.linalg.eigh(moments["small"])
        values, vectors = values[-self.used_rank :].clamp(min=0), vectors[:, -self.used_rank :]
        others = min(self.sizes.examples, self.sizes.width) - self.used_rank
        left = max(0.0, trace - float(values.sum())) / others if others else 0.0  # τ
        share = (values - left) / (values + lam)
        leading = moments["basis"] @ vectors  # V
        self._check(moments["diagonal"], leading, share, lam, left)
        made = [put(x, source.device, self.precision) for x in (leading, share)]
        return FittedLowRank(source, *made, lam + left)

    def _check(self, diagonal: Tensor, leading: Tensor, share: Tensor, lam: float, left: float) -> None:
        """Whether rounding of what is stored would decide."""
        inverse = (1 - torch.linalg.vecdot(leading * share, leading)) / (lam + left)  # K_jj
        explained, mean = ((diagonal + lam) * inverse).mean(), float(diagonal.mean())
        numbers.check_rounding(
            float(explained), self.sizes.rounding, lam, mean, mean if self.relative else None
        )

    def needs(self) -> Needs:
        d, sketch = self.sizes.width, self.sketch_rank
        whole, small, wide = 8 * d * (sketch + 1), 8 * sketch**2, 8 * d * sketch
        added = whole if len(self.sizes.runs()) == 1 else 2 * whole + wide  # while partial results are summed
        memory = whole + max(added, whole + 2 * wide + small)
        moments = {
            "basis": meta_tensor(d, sketch),
            "diagonal": meta_tensor(d),
            "small": meta_tensor(sketch, sketch),
        }
        return Needs(memory, moments)

    @property
    def described(self) -> str:
        return f"the kernel of {self.used_rank:,} singular vectors ({self.sizes.width:,} × {self.sketch_rank:,}) needs"


@dataclass(frozen=True)
class FittedLowRank(Fitted):
    leading: Tensor  # V (D, t)
    share: Tensor  # (s² − τ) / (s² + λ), (t,)
    rest: float  # λ + τ

    def apply(self, rows: Tensor) -> Tensor:
        a = rows.to(self.leading)
        left = torch.addmm(a, (a @ self.leading).mul_(self.share), self.leading.T, alpha=-1)
        return numbers.round_to(left.div_(self.rest), rows)
