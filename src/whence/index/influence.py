"""Self-influence τ(i, i): how much a training example matters to itself (mislabel study of the paper)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.errors import WhenceError
from whence.index.training import Training
from whence.methods import Method
from whence.scores import GroupScores

if TYPE_CHECKING:
    from whence.index.index import Index
    from whence.scores import WeightsLike

_DIAGONAL = 128  # pairs whose final scores are taken from one square block


def self_influence(
    index: Index, method: Method, weights: WeightsLike, normalize_top: int | None, where: Tensor
) -> Tensor:
    """(n,) for the examples `where`, gathered in parts that fit the memory budget."""
    counts = where.dim() == 1 and len(where) > 0 and where.dtype in (torch.int64, torch.int32)
    if not counts or int(where.min()) < 0 or int(where.max()) >= len(index):
        raise WhenceError(
            f"subset must list examples by position, from 0 to {len(index) - 1} and at least one"
        )
    m, training = index.manifest, index.training(method)
    per_example = 4 * 4 * m.width * len(m.models)  # own features, weighted, K g(n), and room to multiply
    tiny = torch.finfo(torch.float32).tiny
    out = []
    for part in where.split(max(1, index.memory // per_example)):
        scores = index.scores_of(method, index.rows(part), [""] * len(part))
        own = _own(scores, training, part, weights)
        if normalize_top is not None:
            total = scores.top(normalize_top, weights).values.sum(1)
            own = torch.where(total > tiny, own / total.clamp(min=tiny), 0.0)
        out.append(own)
    return torch.cat(out)


def _own(scores: GroupScores, training: Training, which: Tensor, weights: WeightsLike) -> Tensor:
    """The score of query i against training example which[i]."""
    w = scores.weights(weights)
    linear = (scores.scaled(w) * training.rows(which)).sum((0, 2))  # (n,)
    if scores.method.linear:
        return linear
    # `final` is defined for blocks, entry by entry: of small square ones the diagonal is what is asked for.
    out = torch.empty_like(linear)
    for start in range(0, len(which), _DIAGONAL):
        at = slice(start, min(start + _DIAGONAL, len(which)))
        out[at] = scores.finish(linear[at].diag(), w, at, which[at]).diagonal()
    return out
