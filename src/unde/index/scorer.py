"""Scores against the training examples of an index, and their self-influence τ(i, i)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unde.devices import CPU, put
from unde.errors import UndeError
from unde.groups import Groups
from unde.index.reader import IndexReader
from unde.index.train_features import StoredFeatures
from unde.kernels import Kernel
from unde.methods import CUSTOM, Method
from unde.methods.registry import check_picklable
from unde.parallel import SERIAL, Executor
from unde.scoring.base import WeightsLike
from unde.scoring.blocks import TINY, check_finite, underflow
from unde.scoring.group_scores import GroupScores

_CHUNK = 2**23  # bytes: small enough to stay in cache from one operation to the next
_DIAGONAL = 128  # pairs whose final scores are taken from one square block
_KERNELS = 2  # that stay in memory
_SELF_SHARE = 32  # examples whose self-influence is computed together take so much of the memory of a device


@dataclass
class Scorer:
    """Scores against the training examples of an index, under any method that fits what is stored."""

    stored: IndexReader
    groups: Groups
    ids: Sequence[Any] | None
    executor: Executor = SERIAL
    _features: dict[Kernel, StoredFeatures] = field(default_factory=dict, init=False, repr=False)

    def train_features(self, method: Method) -> StoredFeatures:
        """Training features under the kernel of a method; those of the last two kernels stay in memory."""
        kernel = method.kernel
        if not self.executor.in_process and CUSTOM in method.describe():
            check_picklable(method)
        features = self._features.pop(kernel, None)
        if features is None and self.stored.compute.device != CPU:
            self._features.clear()  # before another kernel takes memory there
        features = features or StoredFeatures(self.stored, kernel, self.executor, self.ids)
        kept = _KERNELS if features.device == CPU else 1
        self._features = dict([*self._features.items(), (kernel, features)][-kept:])
        return features

    def scores(
        self,
        method: Method,
        features: Tensor,
        digests: list[str],
        last_checkpoint: bool = False,
    ) -> GroupScores:
        """Scores of queries with features (C, Q, D), under all checkpoints or the last one."""
        m, train = self.stored.manifest, self.train_features(method)
        if last_checkpoint:
            train = copy(train)
            train.checkpoint_weights = [0.0] * (m.terms - 1) + m.checkpoint_weights[-1:]
        provenance = {"index": m.id, "method": method.describe(), "model": m.models}
        provenance |= {"data": m.data, "task": m.task["name"]}
        return GroupScores(train, features, method, self.groups, digests, provenance, self.stored.memory)

    def self_influence(
        self, method: Method, weights: WeightsLike, normalize_top: int | None, which: Tensor
    ) -> Tensor:
        """(n,) τ(i, i) of the training examples `which`; see `Index.self_influence`."""
        m = self.stored.manifest
        whole = which.dim() == 1 and len(which) > 0 and which.dtype in (torch.int64, torch.int32)
        if not whole or int(which.min()) < 0 or int(which.max()) >= m.examples:
            raise UndeError(
                f"subset must list examples by position, from 0 to {m.examples - 1} and at least one"
            )
        w = self.scores(method, torch.zeros(m.terms, 1, m.width), [""]).align_weights(weights)
        values = check_finite(self._self_scores(method, w, which), "scores of examples with themselves")
        if float(values.abs().max()) < TINY and self._self_scores(method, w, which, exact=True).any():
            raise underflow("scores of examples with themselves")
        if normalize_top is None:
            return values
        total = self.top_sums(method, w, which, normalize_top)
        tiny = torch.finfo(torch.float32).tiny
        return torch.where(total > tiny, values / total.clamp(min=tiny), 0.0)

    def _self_scores(self, method: Method, w: Tensor, which: Tensor, exact: bool = False) -> Tensor:
        """τ(i, i), shard by shard; `exact` gives them before `final`, in float64, which does not underflow."""
        m, features = self.stored.manifest, self.train_features(method)
        step = _CHUNK if features.device == CPU else (features.block_memory or 0) // _SELF_SHARE
        step = max(1, step // (4 * m.width * m.terms))
        step = step if method.linear else min(step, _DIAGONAL)
        order, found = [], []
        for at, q, n in features.sides(which, step):
            scores = GroupScores(features, q, method, self.groups, [""] * q.shape[1], {}, self.stored.memory)
            found.append(_exact_diagonal(scores, w, n) if exact else _diagonal(scores, w, which[at], n))
            order.append(at)
        values = torch.cat(found).cpu()  # the host waits once
        return torch.empty_like(values).index_copy_(0, torch.cat(order), values)

    def examples(self, method: Method, which: Tensor) -> GroupScores:
        """Scores of training examples as queries, from their stored features."""
        return self.scores(method, self.stored.rows(which), [""] * len(which))

    def top_sums(
        self, method: Method, weights: WeightsLike, which: Tensor, k: int, largest: bool = True
    ) -> Tensor:
        """The sum of the k largest or smallest scores of each example, as many at a time as the budget holds."""
        step = max(1, self.stored.memory // (16 * self.stored.manifest.width * self.stored.manifest.terms))
        tops = (self.examples(method, some).top(k, weights, largest=largest) for some in which.split(step))
        return torch.cat([top.values.sum(1) for top in tops])


def _diagonal(scores: GroupScores, w: Tensor, which: Tensor, n: Tensor) -> Tensor:
    """Scores of queries with themselves: they are the training examples `which`, with blocks (C, n, D)."""
    if scores.method.groupwise:
        return _self_contributions(scores, n, which) @ put(w, n.device)
    linear = torch.linalg.vecdot(scores.query_side.precondition(w), n).sum(0)
    if scores.method.linear:
        return linear
    # `final` is entry by entry: its value is the diagonal of a square block
    return scores.finish(linear.diag(), w, slice(0, len(which)), which).diagonal()


def _exact_diagonal(scores: GroupScores, w: Tensor, n: Tensor) -> Tensor:
    left, right = (put(x, x.device, torch.float64) for x in (scores.query_side.precondition(w), n))
    return torch.linalg.vecdot(left, right).sum(0)


def _self_contributions(scores: GroupScores, blocks: Tensor, train: Tensor) -> Tensor:
    """(n, M) contributions of training examples `train`, the queries, to themselves; blocks are (C, n, D)."""
    parts, everything = (
        torch.zeros(len(scores), len(scores.partition), device=blocks.device),
        slice(0, len(scores)),
    )
    factors = scores.query_side.factors(everything)
    for eta, of_checkpoint, t in zip(scores.train.checkpoint_weights, factors, blocks):
        for at, q, _ in of_checkpoint:
            both = torch.linalg.vecdot(q, t[:, at.columns].unflatten(1, (len(q), -1)).transpose(0, 1))
            parts[:, at.groups] += eta * both.T
    square = torch.diag_embed(parts.T).permute(1, 2, 0)  # (n, n, M), zero off the diagonal
    return scores.method.by_group(square, scores.final_context(everything, train)).diagonal().T
