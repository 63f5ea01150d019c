"""The query side of scores: what of the queries is multiplied with blocks, for totals and for each group.

Weights act here, and so does K where it is block-diagonal: ⟨K(w ⊙ g(q)), g(n)⟩, and ⟨K(1_j ⊙ g(q)), g(n)⟩ for group j.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from unde.groups import Groups
from unde.onednn import each_faster_by_onednn, faster_by_onednn, times, times_each
from unde.scoring.blocking import Batch, batches, joined, mask, start_of
from unde.scoring.train_side import TrainSide
from unde.store.limbs import Factor

_LARGE = 2**23  # multiplications of a group, of fewer of which a batch is faster


class Piece(NamedTuple):
    """What of the queries is multiplied with neighbouring groups of as many columns each: many small products take less
    time as one batch."""

    at: Batch
    queries: Tensor  # (groups, Q, columns of one)
    joint: bool  # whether those of a query lie together in memory, as one product of all groups takes them

    def product(self, features: Tensor) -> Tensor | None:
        """(groups, Q, n) with features (n, D), where one product of all groups is fast."""
        each = self.queries.transpose(0, 1)
        if not (self.joint and each_faster_by_onednn(each, len(features))):
            return None
        facing = features[:, self.at.columns].unflatten(1, (len(self.queries), -1))
        return times_each(each, facing).transpose(0, 1)

    def multiply(self, out: Tensor, features: Tensor, eta: float, add: bool) -> None:
        """Puts η times the products with features (n, D) into `out` (groups, Q, n), or adds them to it."""
        if (made := self.product(features)) is not None:
            out.add_(made, alpha=eta) if add else torch.mul(made, eta, out=out)
            return
        facing = features[:, self.at.columns].unflatten(1, (len(self.queries), -1)).transpose(0, 1)
        large = not self.joint and self.queries[0].numel() * len(features) >= _LARGE
        if not (large and faster_by_onednn(self.queries[0], self.queries[0])):
            out.baddbmm_(self.queries, facing.mT, alpha=eta, beta=int(add))
            return
        for part, q, own in zip(out, self.queries, facing):
            made = times(q, own.contiguous())
            part.add_(made, alpha=eta) if add else torch.mul(made, eta, out=part)


@dataclass(frozen=True, eq=False)
class QuerySide:
    """Queries as they are multiplied with blocks of a training side."""

    train: TrainSide
    queries: Tensor  # (C, Q, D)
    partition: Groups

    def scaled(self, w: Tensor) -> Tensor:
        """Query features with η_c and the weight of its group on each column, (C, Q, D)."""
        column = torch.empty(self.queries.shape[2])
        for j, c in self.runs:
            column[c] = w[j]
        eta = torch.tensor(self.train.checkpoint_weights, dtype=torch.float32)
        return self.queries * (eta.unsqueeze(1) * column).unsqueeze(1)

    def multiplied(self, w: Tensor) -> Tensor:
        """What is multiplied with blocks for weighted totals, (C, Q, D): K on the query side, where it is."""
        scaled = self.scaled(w)
        if self.train.mixes is None:
            return scaled
        return torch.stack([self.train.on_queries(c, rows) for c, rows in enumerate(scaled)])

    def factors(self, w: Tensor) -> list[Factor]:
        """The same of each checkpoint, as it is multiplied with blocks however they are stored."""
        return [Factor(q, self.train.columns) for q in self.multiplied(w)]

    def pieces(self, queries: slice) -> list[list[Piece]]:
        """For each checkpoint, what is multiplied with which columns for which groups."""
        features = self.queries[:, queries]
        if self.train.mixes is None:
            return [[_piece(q, at) for at in batches(self.runs)] for q in features]
        return [self._mixed(c, q) for c, q in enumerate(features)]

    def _mixed(self, checkpoint: int, q: Tensor) -> list[Piece]:
        """K(1_j ⊙ g(q)), for as many groups j at once as share no block of K."""
        pieces, seen = list[Piece](), set[int]()
        for kept, runs in self.passes:
            made = self.train.on_queries(checkpoint, q if kept is None else q * kept)
            pieces += [_piece(made, at) for at in batches(runs, seen)]
        return pieces

    @cached_property
    def passes(self) -> list[tuple[Tensor | None, list[tuple[int, slice]]]]:
        """Masks over columns, no two groups of one block of K under the same, and the (group, columns) they reach.

        One mask that is None where groups are unions of blocks: K g(q) is cut then.
        """
        assert self.train.mixes is not None
        units = list(zip(self.partition.of(self.train.units), self.train.columns))
        starts = [c.start for _, c in units]
        own: list[list[slice]] = []
        reached: list[list[tuple[int, slice]]] = []
        for block in self.train.mixes:
            inside = [
                u for c in block for u in units[bisect_left(starts, c.start) : bisect_left(starts, c.stop)]
            ]
            for i, j in enumerate(dict.fromkeys(j for j, _ in inside)):
                if i == len(own):
                    own.append([])
                    reached.append([])
                own[i] += [c for owner, c in inside if owner == j]
                reached[i] += [(j, c) for c in block]
        masks = [None] if len(own) == 1 else [mask(c, self.queries.shape[2]) for c in own]
        return [(made, joined(sorted(runs, key=start_of))) for made, runs in zip(masks, reached)]

    @cached_property
    def runs(self) -> list[tuple[int, slice]]:
        """(group, columns), where neighbouring units of one group are one run."""
        return joined(zip(self.partition.of(self.train.units), self.train.columns))

    @cached_property
    def squares(self) -> Tensor:
        """(Q, M): as `train.squares`, of the queries."""
        out = torch.zeros(self.queries.shape[1], len(self.partition))
        for eta, q in zip(self.train.checkpoint_weights, self.queries):
            for j, c in self.runs:
                out[:, j] += eta * q[:, c].square().sum(1)
        return out


def _piece(q: Tensor, at: Batch) -> Piece:
    count = at.groups.stop - at.groups.start
    each = q[:, at.columns].unflatten(1, (count, -1))
    if each_faster_by_onednn(each):
        return Piece(at, each.contiguous().transpose(0, 1), joint=True)
    return Piece(at, each.transpose(0, 1).contiguous(), joint=False)
