"""The eigenvalue-corrected Kronecker kernel, K = Q (Λ + λI)⁻¹ Qᵀ, parameter by parameter (paper, EKFAC).

For a parameter whose gradient is a matrix G = Σ_t left_t right_tᵀ the eigenvectors of the covariances of `left`
and `right` give the basis Q = Q_left ⊗ Q_right. Its eigenvalues are not the products of theirs (that would be
K-FAC) but Λ = mean over examples of (Qᵀ g)², one for each coordinate, from the stored features.

Parameters without such a structure (biases, norms, what was computed by a general way) get their exact second
moment in place of the approximation, up to `EXACT` entries, and its diagonal beyond.
Damping is a multiple of the mean of Λ of each parameter, or absolute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.kernels.base import Block, Part, width
from unde.linalg import eigh

EXACT = 4096  # entries of a parameter whose second moment is kept whole
_ZERO = 1e-12  # an eigenvalue this much smaller than the largest is rounding


@dataclass(frozen=True)
class EKFACKernel:
    damping: float
    relative: bool = True
    fisher: str = "empirical"  # whose gradients Λ is the mean of: with the true labels, or "sampled" ones

    def apply(
        self,
        blocks: Sequence[Block],
        parts: Sequence[Part],
        memory: int,
        fit: Sequence[Block] | None = None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Φ K in the blocks of Φ: one pass over the features for Λ, one to apply."""
        fit = fit or blocks
        given = blocks[0][1]().dtype
        spectra = [_spectrum(part, given) for part in parts]
        need = sum(s.bytes for s in spectra) + 16 * width(parts)
        if need > memory:
            raise UndeError(
                f"the eigenvectors of {len(parts)} parameters need {need / 2**30:.3g} GiB, the memory budget "
                f"is {memory / 2**30:.3g} GiB: raise memory=, or build with a smaller projection"
            )
        for _, read in fit:
            phi = read()
            for part, s in zip(parts, spectra):
                s.see(phi[:, part.columns])
        count = fit[-1][0].stop
        inverse = [self._inverse(part, s.settle(count)) for part, s in zip(parts, spectra)]
        for rows, read in blocks:
            phi = read()
            out = torch.empty_like(phi)
            for part, s, scale in zip(parts, spectra, inverse):
                out[:, part.columns] = s.back(s.rotate(phi[:, part.columns]) * scale.to(given))
            yield rows, out

    def _inverse(self, part: Part, eigenvalues: Tensor) -> Tensor:
        """1 / (Λ + λ); 0 where a parameter has no gradient at all."""
        largest = float(eigenvalues.max())
        if not largest < float("inf"):
            raise UndeError(
                f"the second moments of parameter {part.name!r} are NaN or infinite: some features are not finite, "
                "or too large to square. Rebuild the index with on_bad='skip', or rescale the loss"
            )
        if largest == 0:
            return torch.zeros_like(eigenvalues)
        damping = self.damping * float(eigenvalues.mean()) if self.relative else self.damping
        if float(eigenvalues.min()) + damping <= _ZERO * largest:
            lost = int((eigenvalues <= _ZERO * largest).sum())
            raise UndeError(
                f"the kernel of parameter {part.name!r} is rank-deficient: {lost} of its {len(eigenvalues)} "
                f"eigenvalues are zero and the damping is {damping:.3g}. Raise the damping"
            )
        return 1 / (eigenvalues + damping)


class _Spectrum:
    """A basis of one parameter's feature space and the mean squares of features along it."""

    bytes = 0

    def __init__(self, size: int) -> None:
        self.squares = torch.zeros(size, dtype=torch.float64)

    def rotate(self, x: Tensor) -> Tensor:
        return x

    def back(self, x: Tensor) -> Tensor:
        return x

    def see(self, x: Tensor) -> None:
        self.squares += self.rotate(x).double().square().sum(0)

    def settle(self, count: int) -> Tensor:
        return self.squares / count


class _Kronecker(_Spectrum):
    def __init__(self, part: Part, factors: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
        super().__init__(part.columns.stop - part.columns.start)
        left, right = (eigh(f, part.name)[1].to(dtype) for f in factors)
        self.left, self.right = left, right
        self.bytes = left.nbytes + right.nbytes

    def rotate(self, x: Tensor) -> Tensor:  # Q_leftᵀ G Q_right
        g = x.reshape(-1, len(self.left), len(self.right))
        return (self.left.T @ (g @ self.right)).flatten(1)

    def back(self, x: Tensor) -> Tensor:  # Q_left G Q_rightᵀ
        g = x.reshape(-1, len(self.left), len(self.right))
        return (self.left @ (g @ self.right.T)).flatten(1)


class _Whole(_Spectrum):
    """The exact second moment: its basis is known once all features were seen."""

    def __init__(self, part: Part, dtype: torch.dtype) -> None:
        size = part.columns.stop - part.columns.start
        super().__init__(size)
        self.name, self.dtype = part.name, dtype
        self.moment = torch.zeros(size, size, dtype=torch.float64)
        self.bytes = 2 * self.moment.nbytes

    def see(self, x: Tensor) -> None:
        self.moment += (x.T @ x).double()

    def settle(self, count: int) -> Tensor:
        values, vectors = eigh(self.moment / count, self.name)
        self.vectors = vectors.to(self.dtype)
        return values.clamp(min=0)

    def rotate(self, x: Tensor) -> Tensor:
        return x @ self.vectors

    def back(self, x: Tensor) -> Tensor:
        return x @ self.vectors.T


def _spectrum(part: Part, dtype: torch.dtype) -> _Spectrum:
    if part.factors is not None:
        return _Kronecker(part, part.factors, dtype)
    size = part.columns.stop - part.columns.start
    return _Whole(part, dtype) if size <= EXACT else _Spectrum(size)
