"""The eigenvalue-corrected Kronecker kernel, K = Q (Λ + λI)⁻¹ Qᵀ, parameter by parameter (paper, EKFAC).

For a parameter whose gradient is a matrix G = Σ_t left_t right_tᵀ the eigenvectors of the covariances of `left`
and `right` give the basis Q = Q_left ⊗ Q_right. Its eigenvalues are not the products of theirs (that would be
K-FAC) but Λ = mean over examples of (Qᵀ g)², one for each coordinate, from the stored features.

A side that is long, or the rows of an embedding, has the identity for a basis: Q = I ⊗ Q_right.

Parameters without such a structure (biases, norms, what was computed by a general way) get their exact second
moment in place of the approximation, up to `EXACT` entries, and its diagonal beyond.
Damping is a multiple of the mean of Λ of each parameter, or of the whole model, or absolute. K does not mix
parameters, so it acts on the query side.

Whitened features are (Λ + λ)^−1/2 Qᵀ g already, with Λ as K-FAC has it (`unde.gradients.whitening`): there K is
(Λ + λ) / (Λ + λ′), the identity for λ′ = λ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unde.devices import double_device, put
from unde.errors import UndeError
from unde.gradients.factors import eigh
from unde.kernels.base import (
    BoundKernel,
    FeatureLayout,
    Fitted,
    KernelSource,
    Moments,
    Needs,
    ParameterColumns,
    PerParameterKernel,
    Round,
    chunks,
    meta_tensor,
)
from unde.kernels.diagonal import FittedDiagonal, FittedIdentity
from unde.kernels.precision import (
    cast_if_in_range,
    check_rounding,
    damping_value,
    double,
    product,
)

EXACT = 4096  # entries of a parameter whose second moment is kept whole
_ONE_SIDED = "one-sided"  # marks parameters with one covariance that is zero
_ZERO = 1e-12  # an eigenvalue this much smaller than the largest is rounding


@dataclass(frozen=True)
class EKFACKernel:
    damping: float
    relative: bool = True
    fisher: str = "empirical"  # labels of the gradients: those of the data, "sampled" or "true"
    damping_scope: str = (
        "layer"  # relative damping is a multiple of the mean of Λ of each parameter, or the "model"
    )

    def bind(self, sizes: FeatureLayout) -> BoundKernel:
        return _BoundWhitened(sizes, self) if sizes.whitened else _BoundEKFAC(sizes, self)

    def dampings(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """λ of each parameter, from its eigenvalues Λ."""
        each = {name: float(double(v).mean()) for name, v in values.items()}
        if self.damping_scope == "model":
            count = sum(v.numel() for v in values.values())
            whole = sum(float(double(v).sum()) for v in values.values()) / count
            each = dict.fromkeys(each, whole)
        return {name: damping_value(self.damping, self.relative, unit) for name, unit in each.items()}


@dataclass(frozen=True)
class _BoundWhitened(PerParameterKernel):
    kernel: EKFACKernel

    @property
    def key(self) -> str:
        return "whitened"

    def fit(self, moments: Moments, source: KernelSource) -> Fitted:
        whitening = source.whitening()
        dampings = self.kernel.dampings({name: values for name, (values, _) in whitening.items()})
        scale = torch.ones(self.sizes.width, dtype=torch.float64, device=double_device(source.device))
        for part in self.sizes.parts:
            values, before = whitening[part.name]
            after = dampings[part.name]
            if not values.any() or math.isclose(before, after, rel_tol=1e-6):
                continue
            check_full_rank(part.name, values, after)
            values = values.to(scale)
            scale[part.columns] = (values + before) / (values + after)
        if scale.eq(1).all():
            return FittedIdentity(source)
        return FittedDiagonal(source, put(scale, source.device, torch.float32))


@dataclass(frozen=True)
class _BoundEKFAC(PerParameterKernel):
    kernel: EKFACKernel

    @property
    def key(self) -> str:
        return f"ekfac {self.kernel.fisher}"

    @property
    def rounds(self) -> Sequence[Round]:
        """Covariances, whose eigenvectors are the bases; then the mean squares of features along them."""
        jobs = len(self.sizes.runs())
        return [
            Round("covariances", jobs, self._covariances, self._bases),
            Round("eigenvalues", jobs, self._squares, self._eigenvalues),
        ]

    def _covariances(self, source: KernelSource, i: int, before: Moments) -> Moments:
        total: dict[str, Tensor] = {}
        for s in (s for blocks in self.sizes.runs()[i] for s in blocks):
            for name, pair in source.factors(s).items():
                for side, matrix in zip(("left", "right"), pair):
                    if matrix is None:
                        continue
                    key = f"{side} {name}"
                    total[key] = total[key] + double(matrix) if key in total else double(matrix)
        return total

    def _bases(self, covariances: Moments) -> Moments:
        """Of the parameters whose covariances are not all zero: others went a general way. Where one side is zero, the
        parameter has no gradient, or one too small to square."""
        out = {}
        for part in self.sizes.parts:
            given = {side: covariances.get(f"{side} {part.name}") for side in ("left", "right")}
            pair = {side: c for side, c in given.items() if c is not None}
            if pair and all(c.any() for c in pair.values()):
                for side, c in pair.items():
                    out[f"{side} {part.name}"] = eigh(c, part.name)[1].to(self.sizes.dtype)
            elif any(c.any() for c in pair.values()):
                out[f"{_ONE_SIDED} {part.name}"] = torch.zeros(1)
        return out

    def _squares(self, source: KernelSource, i: int, before: Moments) -> Moments:
        spectra = [_spectrum(part, before) for part in self.sizes.parts]
        total: dict[str, Tensor] = {}
        for phi in chunks(source, self.sizes.runs()[i]):
            for part, spectrum in zip(self.sizes.parts, spectra):
                seen = spectrum.squares(phi[:, part.columns])
                key = f"{spectrum.kind} {part.name}"
                total[key] = total[key] + seen if key in total else seen
            del phi  # before the next is read
        return total

    def _eigenvalues(self, sums: Moments) -> Moments:
        """Means over examples; of exact second moments, their eigenvectors too."""
        out, count = {}, self.sizes.examples / self.sizes.labels
        for key, total in sums.items():
            kind, name = key.split(" ", 1)
            if kind == "whole":
                values, vectors = eigh(total / count, name)
                out[f"basis {name}"] = vectors.to(self.sizes.dtype)
                out[f"values {name}"] = values.clamp(min=0)
            else:
                out[f"values {name}"] = total / count
        return out

    def fit(self, moments: Moments, source: KernelSource) -> Fitted:
        made, mean = [], self._mean(moments)
        for part in self.sizes.parts:
            scale = self._inverse(part, moments[f"values {part.name}"], mean)
            if scale.any() and f"{_ONE_SIDED} {part.name}" in moments:
                raise UndeError(
                    f"the gradients of parameter {part.name!r} are too small to square in float32: multiply the loss "
                    "by a constant, which these scores do not depend on, and build again"
                )
            scale = cast_if_in_range(scale, self.sizes.dtype, source.device)
            made.append((part.columns, _spectrum(part, moments), scale))
        return FittedEKFAC(source, made)

    def _mean(self, moments: Moments) -> float | None:
        """The mean of Λ over the whole model, where relative damping is a multiple of that."""
        if self.kernel.damping_scope == "layer":
            return None
        return sum(float(moments[f"values {p.name}"].sum()) for p in self.sizes.parts) / self.sizes.width

    def _inverse(self, part: ParameterColumns, eigenvalues: Tensor, whole: float | None) -> Tensor:
        """1 / (Λ + λ), λ a multiple of the mean of Λ or of the `whole` model; 0 where there is no gradient at all."""
        largest = float(eigenvalues.max())
        if not largest < float("inf"):
            raise UndeError(
                f"the second moments of parameter {part.name!r} are NaN or infinite: some features are not finite, "
                "or too large to square. Rebuild the index with on_bad='skip', or rescale the loss"
            )
        if largest == 0:
            return torch.zeros_like(eigenvalues)
        mean = float(eigenvalues.mean())
        unit = mean if whole is None else whole
        damping = damping_value(self.kernel.damping, self.kernel.relative, unit)
        check_full_rank(part.name, eigenvalues, damping)
        scale = 1 / (eigenvalues + damping)
        try:  # rounding spreads evenly over the basis, so every coordinate has the share that the mean one has
            share = (mean + damping) * float(scale.mean())
            check_rounding(share, self.sizes.rounding, damping, mean, unit if self.kernel.relative else None)
        except UndeError as e:
            raise UndeError(f"parameter {part.name!r}: {e}") from None
        return scale

    def needs(self) -> Needs:
        parts = [_PartNeeds(p) for p in self.sizes.parts]
        memory = sum(p.budget for p in parts) + 8 * self.sizes.width
        return Needs(memory, {name: t for p in parts for name, t in p.moments().items()})

    @property
    def described(self) -> str:
        return f"the eigenvectors of {len(self.sizes.parts)} parameters need"


def check_full_rank(name: str, eigenvalues: Tensor, damping: float) -> None:
    """Raise if a damped eigenvalue is zero but for rounding."""
    largest = float(eigenvalues.max())
    if float(eigenvalues.min()) + damping <= _ZERO * largest:
        lost = int((eigenvalues <= _ZERO * largest).sum())
        raise UndeError(
            f"the kernel of parameter {name!r} is rank-deficient: {lost} of its {len(eigenvalues)} "
            f"eigenvalues are zero and the damping is {damping:.3g}. Raise the damping"
        )


@dataclass(frozen=True)
class _PartNeeds:
    """What one parameter takes: by its two sides, as a whole, or by its diagonal alone."""

    part: ParameterColumns

    @property
    def whole(self) -> int:
        """Rows of its exact second moment, 0 where there is none."""
        return self.part.size if self.part.sides is None and self.part.size <= EXACT else 0

    @property
    def _decomposed(self) -> Sequence[int]:
        """Rows of the matrices that it has eigenvectors of."""
        sides = tuple(n for n in self.part.sides or () if n is not None)
        return sides or ((self.whole,) if self.whole else ())

    @property
    def budget(self) -> int:
        sides = sum(n * n for n in self._decomposed) if self.part.sides else 0
        return 16 * self.whole**2 if self.whole else 4 * sides + 8 * self.part.size

    def moments(self) -> dict[str, Tensor]:
        """What is kept of it."""
        pair = self.part.sides or (None, None)
        sides = [side for side, n in zip(("left", "right"), pair) if n is not None] or ["basis"]
        found = {
            f"{side} {self.part.name}": meta_tensor(n, n, dtype=torch.float32)
            for side, n in zip(sides, self._decomposed)
        }
        values = meta_tensor(self.part.size)
        return found | {f"values {self.part.name}": values}


@dataclass(frozen=True)
class FittedEKFAC(Fitted):
    parts: list[tuple[slice, _Spectrum, Tensor]]

    def apply(self, rows: Tensor) -> Tensor:
        out = torch.empty_like(rows)
        for columns, s, scale in self.parts:
            out[:, columns] = s.back((s.rotate(rows[:, columns]).to(scale.device) * scale).to(rows))
        return out


class _Spectrum:
    """A basis of one parameter's feature space: the coordinates themselves."""

    kind = "diagonal"

    def rotate(self, x: Tensor) -> Tensor:
        return x

    def back(self, x: Tensor) -> Tensor:
        return x

    def squares(self, x: Tensor) -> Tensor:
        """Sums over examples of squares along the basis."""
        along = self.rotate(x)
        return along.to(double_device(x.device), torch.float64, copy=True).square_().sum(0)


class _Kronecker(_Spectrum):
    kind = "kronecker"

    def __init__(self, left: Tensor | None, right: Tensor | None) -> None:
        self.left, self.right = left, right  # None: the identity

    def rotate(self, x: Tensor) -> Tensor:  # Q_leftᵀ G Q_right
        g = self._matrix(x)
        g = g if self.right is None else _times(g, self.right)
        return (g if self.left is None else self.left.T @ g).flatten(1)

    def back(self, x: Tensor) -> Tensor:  # Q_left G Q_rightᵀ
        g = self._matrix(x)
        g = g if self.right is None else _times(g, self.right.T)
        return (g if self.left is None else self.left @ g).flatten(1)

    def _matrix(self, x: Tensor) -> Tensor:
        if self.left is not None:
            return x.unflatten(1, (len(self.left), -1))
        return x.unflatten(1, (-1, len(self.right) if self.right is not None else 1))


def _times(g: Tensor, right: Tensor) -> Tensor:
    """G times the basis (channels, channels), for each tap of a kernel where G has several columns for a channel."""
    if g.shape[2] == len(right):
        return g @ right
    return (right.T @ g.unflatten(2, (len(right), -1))).flatten(2)


class _Whole(_Spectrum):
    """The exact second moment: its basis is known once all features were seen."""

    kind = "whole"

    def __init__(self, vectors: Tensor | None) -> None:
        self.vectors = vectors

    def squares(self, x: Tensor) -> Tensor:
        return double(product(x.T, x))

    def rotate(self, x: Tensor) -> Tensor:
        assert self.vectors is not None
        return x @ self.vectors

    def back(self, x: Tensor) -> Tensor:
        assert self.vectors is not None
        return x @ self.vectors.T


def _spectrum(part: ParameterColumns, moments: Moments) -> _Spectrum:
    pair = [moments.get(f"{side} {part.name}") for side in ("left", "right")]
    if any(side is not None for side in pair):
        return _Kronecker(*pair)
    return _Whole(moments.get(f"basis {part.name}")) if part.size <= EXACT else _Spectrum()
