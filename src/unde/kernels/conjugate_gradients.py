"""Conjugate gradients with a preconditioner, for several right sides at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unde.errors import UndeError

_SOLVED = 1e-6  # a relative residual at which a right side is left alone


def conjugate_gradients(
    multiply: Callable[[Tensor, int], Tensor],
    precondition: Callable[[Tensor], Tensor],
    right: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """(Q, D) solutions x of A x = b for the rows b of `right`, and (Q,) ‖b − A x‖ / ‖b‖.

    Args:
        multiply: A times rows, given these and the number of the step; A is symmetric and positive.
        precondition: About A⁻¹ times rows.
        right: (Q, D).
        steps: Products with A.

    >>> a = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    >>> x, residual = conjugate_gradients(lambda v, step: v @ a, lambda r: r.clone(), torch.ones(1, 3), 3)
    >>> [round(value, 4) for value in x[0].tolist()], bool(residual < 1e-5)
    ([1.0, 0.5, 0.25], True)
    """
    size = right.norm(dim=1)
    left, x = right.clone(), torch.zeros_like(right)
    z = precondition(left)
    direction, product = z.clone(), torch.linalg.vecdot(left, z)
    for step in range(steps):
        open_ = left.norm(dim=1) > _SOLVED * size
        if not open_.any():
            break
        moved = multiply(direction, step)
        curvature = torch.linalg.vecdot(direction, moved)
        if bool((open_ & (curvature <= 0)).any()):
            raise UndeError(
                "conjugate gradients met a direction of negative curvature: the loss is not convex in the outputs of "
                "the model. Raise the damping, or leave cg out"
            )
        length = torch.where(open_, product / curvature, 0.0).unsqueeze(1)
        x += length * direction
        left -= length * moved
        z = precondition(left)
        before, product = product, torch.linalg.vecdot(left, z)
        direction = z + torch.where(open_, product / before, 0.0).unsqueeze(1) * direction
    return x, left.norm(dim=1) / size.clamp(min=torch.finfo(size.dtype).tiny)
