"""What the weights maximise: the paper's self-supervised objective and the variants of its ablation.

All are written as objectives to maximise, i.e. minus the paper's losses, on the scores of one query over
the training set, or of several queries at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unde.errors import unknown

# The numerator is a sum over sides of mean(top-k of side · scores): +1 the proponents, −1 the opponents.
SIDES: dict[str, tuple[int, ...]] = {
    "top-k": (1,),
    "supervised": (),
    "bottom-k": (-1,),
    "top-k-bottom-k": (1, -1),
    "no-norm": (1,),
}
LOSSES = tuple(SIDES)


def objective(scores: Tensor, k: int, loss: str = "top-k", positives: Tensor | None = None) -> Tensor:
    """The objective of each query, given its scores over the training set: (..., N) → (...).

    `"top-k"` is the mean of the k largest scores over the norm of all N, the paper's main loss with its sign
    turned; `"bottom-k"` is minus the mean of the k smallest over the norm, `"top-k-bottom-k"` the sum of
    the two, `"no-norm"` the mean of the k largest alone, and `"supervised"` the score of one known positive
    for each query (`positives`, (...) indices) over the norm. A query whose scores are all zero counts 0.

    >>> objective(torch.tensor([3.0, 4.0, 0.0]), k=1)
    tensor(0.8000)
    >>> objective(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]), k=2)
    tensor([0.7000, 0.0000])
    """
    if loss not in SIDES:
        raise unknown("loss", loss, LOSSES)
    if loss != "no-norm":
        scores = normalised(scores)
    if loss == "supervised":
        if positives is None:
            raise TypeError("the supervised objective needs positives")
        return scores.gather(-1, positives.to(scores.device)[..., None]).squeeze(-1)
    sides = [(side * scores).topk(k, dim=-1).values.mean(-1) for side in SIDES[loss]]
    return torch.stack(sides).sum(0)


def normalised(scores: Tensor) -> Tensor:
    """The scores of each query over their norm, (..., N); all zero if they are.

    >>> normalised(torch.tensor([3e-30, 4e-30]))
    tensor([0.6000, 0.8000])
    """
    # The unit of the scores cancels, so take one in which squares neither overflow nor vanish.
    unit = scores.detach().abs().amax(-1, keepdim=True)  # (..., 1)
    scores = scores / torch.where(unit > 0, unit, 1.0)
    norm = torch.linalg.vector_norm(scores, dim=-1, keepdim=True)  # (..., 1)
    return scores / torch.where(norm > 0, norm, 1.0)
