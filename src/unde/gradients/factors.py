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
from torch import Tensor

from unde.projection import Spec, two_sides

LIMIT = 4096  # the longest side that gets a covariance matrix: that of a vocabulary would cost more than the model


def sides(spec: Spec, shape: Sequence[int]) -> tuple[int, int] | None:
    """The sizes of the two covariances of a parameter; None if its gradient is no sum of small outer products.

    >>> sides(Spec.parse("kron(16)"), (768, 3072)), sides(Spec.parse("kron(16)"), (768,))
    ((16, 16), None)
    """
    if len(shape) < 2 or spec.kind not in ("none", "kron", "pca"):
        return None
    both = two_sides(spec, tuple(shape))
    return None if max(both) > LIMIT else both


class Factors:
    """Running sums for some parameters; `sizes` gives the two sides of each, None for a side to leave out."""

    def __init__(
        self,
        sizes: Mapping[str, tuple[int | None, int | None]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.sums = {
            name: tuple(None if n is None else torch.zeros(n, n, device=device, dtype=dtype) for n in pair)
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
                x = x * matching.unsqueeze(-1)
            rows = x.reshape(-1, x.shape[-1]).to(total.dtype)
            total.addmm_(rows.T, rows)

    def take(self) -> Tensor:
        """Return all sums as one vector, in the order of the parameters, left before right; reset them to zero."""
        totals = [total for pair in self.sums.values() for total in pair if total is not None]
        vector = torch.cat([total.flatten() for total in totals])
        for total in totals:
            total.zero_()
        return vector


def factor_sizes(units: Sequence[Mapping[str, Any]], projection: str) -> dict[str, tuple[int, int]]:
    """The sizes of the covariances of those units (name, shape) that have them under a projection."""
    spec = Spec.parse(projection)
    sizes = {u["name"]: sides(spec, u["shape"]) for u in units}
    return {name: pair for name, pair in sizes.items() if pair is not None}


def split(vector: Tensor, sizes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[Tensor, Tensor]]:
    """The matrices from the vector of `Factors.take`."""
    out, start = {}, 0
    for name, pair in sizes.items():
        matrices = []
        for n in pair:
            matrices.append(vector[start : start + n * n].view(n, n))
            start += n * n
        out[name] = (matrices[0], matrices[1])
    return out
