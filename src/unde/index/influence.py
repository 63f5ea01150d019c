"""Self-influence τ(i, i): how much a training example matters to itself (mislabel study of the paper)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.methods import Method

if TYPE_CHECKING:
    from unde.index.index import Index
    from unde.scores import WeightsLike

_CHUNK = 2**23  # bytes: small enough to stay in cache from one operation to the next
_DIAGONAL = 128  # pairs whose final scores are taken from one square block


def self_influence(
    index: Index, method: Method, weights: WeightsLike, normalize_top: int | None, where: Tensor
) -> Tensor:
    """(n,) for the examples `where`."""
    counts = where.dim() == 1 and len(where) > 0 and where.dtype in (torch.int64, torch.int32)
    if not counts or int(where.min()) < 0 or int(where.max()) >= len(index):
        raise UndeError(f"subset must list examples by position, from 0 to {len(index) - 1} and at least one")
    own = _own(index, method, weights, where)
    if normalize_top is None:
        return own
    total = _top_sums(index, method, weights, where, normalize_top)
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(total > tiny, own / total.clamp(min=tiny), 0.0)


def leverage(index: Index, method: Method) -> Tensor:
    """(N,) ⟨g(n), K g(n)⟩, summed over checkpoints with η."""
    training, out = index.training(method), torch.empty(len(index))
    for s, rows in enumerate(training.cuts):
        pairs = zip(index.manifest.checkpoint_weights, index.blocks(s), training.block(s))
        out[rows] = torch.stack([eta * torch.linalg.vecdot(f, t) for eta, f, t in pairs]).sum(0)
    return out


def _own(index: Index, method: Method, weights: WeightsLike, where: Tensor) -> Tensor:
    """τ(i, i), shard by shard: one pass over the features and one over K g(n)."""
    training, out = index.training(method), torch.empty(len(where))
    step = max(1, _CHUNK // (4 * index.manifest.width * index.manifest.terms))
    step = step if method.linear else min(step, _DIAGONAL)
    for s, rows in enumerate(training.cuts):
        here = ((where >= rows.start) & (where < rows.stop)).nonzero()[:, 0]
        if not len(here):
            continue
        features, transformed = index.blocks(s), training.block(s)
        for part in here.split(step):
            local = where[part] - rows.start
            q = torch.stack([f.index_select(0, local) for f in features])
            n = torch.stack([t.index_select(0, local) for t in transformed])
            scores = index.scores_of(method, q, [""] * len(part))
            w = scores.weights(weights)
            if method.groupwise:
                out[part] = scores.own(n, where[part]) @ w
                continue
            linear = torch.linalg.vecdot(scores.scaled(w), n).sum(0)
            if (
                not method.linear
            ):  # `final` is entry by entry: the diagonal of a square block is what is asked
                linear = scores.finish(linear.diag(), w, slice(0, len(part)), where[part]).diagonal()
            out[part] = linear
    return out


def _top_sums(index: Index, method: Method, weights: WeightsLike, where: Tensor, m: int) -> Tensor:
    """The sum of the m largest scores of each example, as many examples at a time as the budget holds."""
    width = index.manifest.width * index.manifest.terms
    out = []
    for part in where.split(max(1, index.memory // (4 * 4 * width))):
        scores = index.scores_of(method, index.rows(part), [""] * len(part))
        out.append(scores.top(m, weights).values.sum(1))
    return torch.cat(out)
