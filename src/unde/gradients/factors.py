"""Covariances of layer inputs and output gradients (the Kronecker factors of EKFAC), added up in the feature pass.

The gradient of a matrix is a sum of outer products Σ_t left_t right_tᵀ over the positions of an example (output
gradient and input of a linear layer, or the reverse where a weight is stored transposed). Over all positions of all
examples this adds up Σ left leftᵀ and Σ right rightᵀ, of the projected sides where they are projected. Positions that
the task masks (padding) do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unde.devices import put
from unde.errors import UndeError
from unde.gradients.parameters import placement
from unde.projection import MATRICES, WHOLE, Spec, two_sides

LIMIT = 4096  # the longest side that gets a covariance matrix: that of a vocabulary would cost more than the model
SHORT = 1024  # sides up to this have one in any case
THIN = 64  # longer ones not where they are so many times the other: that of an adapter would dwarf its parameters
Sides = tuple[int | None, int | None]


def sides(spec: Spec, shape: Sequence[int], lookup: bool = False) -> Sides | None:
    """The sizes of the two covariances of a parameter; None if its gradient is no sum of small outer products.

    Sides that are too long have none, nor have the long sides of adapters (LoRA) on wide layers, nor the rows of a
    table that is looked up (an embedding). The right side of a convolution is that of its patches; if that is too long,
    of input channels, each tap counting as a position.

    >>> sides(Spec.parse("kron(16)"), (768, 3072)), sides(Spec.parse("kron(16)"), (768,))
    ((16, 16), None)
    >>> sides(Spec.parse("none"), (768, 3072)), sides(Spec.parse("none"), (16, 4096))
    ((768, 3072), (16, None))
    >>> sides(Spec.parse("none"), (50257, 768), lookup=True), sides(Spec.parse("none"), (512, 512, 3, 3))
    ((None, 768), (512, 512))
    """
    if len(shape) < 2 or spec.kind not in MATRICES:
        return None
    left, right = two_sides(spec, tuple(shape))
    if spec.kind not in WHOLE:
        return (left, right) if max(left, right) <= LIMIT else None
    if len(shape) > 2:
        right = right if right <= LIMIT else shape[1]
        if left > LIMIT or right > LIMIT:
            return None
    most_left, most_right = (min(LIMIT, max(SHORT, THIN * other)) for other in (right, left))
    pair = (left if left <= most_left and not lookup else None, right if right <= most_right else None)
    return pair if any(pair) else None


class Factors:
    """Running sums for some parameters; `sizes` gives the two sides of each, None for a side to leave out."""

    def __init__(
        self,
        sizes: Mapping[str, tuple[int | None, int | None]],
        model: nn.Module,
    ) -> None:
        """Each sum is where its parameter is."""
        self.device, dtype = placement(model)
        homes = {name: p.device for name, p in model.named_parameters()}
        self.sums = {
            name: tuple(
                None if n is None else torch.zeros(n, n, device=homes[name], dtype=dtype) for n in pair
            )
            for name, pair in sizes.items()
        }

    def add(self, name: str, left: Tensor, right: Tensor, mask: Tensor | Sequence[Tensor] | None) -> None:
        """Add the sides (B·n, T, ·) of one call; `mask` is (B, T), or several for sequences of several lengths."""
        masks = [] if mask is None else [mask] if isinstance(mask, Tensor) else mask
        for total, x in zip(self.sums.get(name, ()), (left, right)):
            if total is None:
                continue
            matching = next((m for m in masks if m.shape == x.shape[:2]), None)
            if matching is not None:
                x = x * matching.unsqueeze(-1).to(x.device)
            if x.shape[-1] != len(total):  # channels and taps of a kernel
                x = x.unflatten(-1, (len(total), -1)).mT
            rows = x.reshape(-1, len(total)).to(total.dtype)
            total.addmm_(rows.T, rows)

    def add_rows(self, name: str, gradients: Tensor) -> None:
        """Add Gᵀ G of whole gradients (B, R·C) of a table that is looked up, whose two uses may be tied."""
        total = self.sums[name][1]
        if total is not None:
            rows = gradients.reshape(-1, len(total)).to(total)
            total.addmm_(rows.T, rows)

    def take(self) -> Tensor:
        """Return all sums as one vector, in the order of the parameters, left before right; reset them to zero."""
        totals = [total for pair in self.sums.values() for total in pair if total is not None]
        vector = torch.cat([total.flatten().to(self.device) for total in totals])
        for total in totals:
            total.zero_()
        return vector


def factor_sizes(units: Sequence[Mapping[str, Any]], projection: str) -> dict[str, Sides]:
    """The sizes of the covariances of those units (name, shape) that have them under a projection."""
    spec = Spec.parse(projection)
    sizes = {u["name"]: sides(spec, u["shape"], u.get("lookup", False)) for u in units}
    return {name: pair for name, pair in sizes.items() if pair is not None}


def length(sizes: Mapping[str, Sides]) -> int:
    """Numbers in the vector of `Factors.take`."""
    return sum(n * n for pair in sizes.values() for n in pair if n is not None)


def split(vector: Tensor, sizes: Mapping[str, Sides]) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """The matrices from the vector of `Factors.take`."""
    out, start = dict[str, tuple[Tensor | None, Tensor | None]](), 0
    for name, pair in sizes.items():
        matrices: list[Tensor | None] = []
        for n in pair:
            matrices.append(None if n is None else vector[start : start + n * n].view(n, n))
            start += 0 if n is None else n * n
        out[name] = (matrices[0], matrices[1])
    return out


def eigh(matrix: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues, smallest first, and eigenvectors in columns of a covariance of the parameter `name`, in float64.

    >>> eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), "weight")[0]
    tensor([1., 2.], dtype=torch.float64)
    """
    matrix = put(matrix, matrix.device, torch.float64)
    if not matrix.isfinite().all():
        raise UndeError(
            f"a covariance of parameter {name!r} holds NaN or infinite entries: an example has a gradient that is "
            "not finite, or too large to square. Rebuild the index with on_bad='skip', or rescale the loss"
        )
    matrix = (matrix + matrix.T) / 2
    try:
        return torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # it fails to converge on rare matrices with many equal eigenvalues
        try:
            vectors, values, _ = torch.linalg.svd(matrix)
        except torch.linalg.LinAlgError as e:
            raise UndeError(
                f"no eigenvectors could be found for a covariance ({len(matrix)} × {len(matrix)}) of parameter "
                f"{name!r} ({e}): exclude the parameter, or build with another projection"
            ) from None
        return values.flip(0), vectors.flip(1)
