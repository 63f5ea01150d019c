"""Eigenvectors of covariances, in float64; what fails is named by the parameter it belongs to."""

from __future__ import annotations

import torch
from torch import Tensor

from unde.errors import UndeError


def eigh(matrix: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues, smallest first, and eigenvectors in columns of a covariance of the parameter `name`, in float64.

    >>> eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), "weight")[0]
    tensor([1., 2.], dtype=torch.float64)
    """
    matrix = matrix.double()
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
