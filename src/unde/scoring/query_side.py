"""The query side of scores: what of the queries is multiplied with blocks, for totals and for each group.

Weights act here, and so does K where it is block-diagonal: ⟨K(w ⊙ g(q)), g(n)⟩, and ⟨K(1_j ⊙ g(q)), g(n)⟩ for group j.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from unde.devices import put
from unde.groups import Groups
from unde.onednn import faster_by_onednn, times
from unde.scoring.train_features import TrainFeatures

_LARGE = 2**23  # multiplications of a group; with fewer, a batch of groups is faster

Run = tuple[int, slice]  # a group, and neighbouring columns of it


class GroupBatch(NamedTuple):
    """Neighbouring groups, with the same number of neighbouring columns each."""

    groups: slice
    columns: slice
    add: bool  # whether these groups had other columns before


class QueryFactor(NamedTuple):
    """Query features of a batch of groups: many small products take less time as one batch."""

    at: GroupBatch
    queries: Tensor  # (groups, Q, columns of one)

    def multiply(self, out: Tensor, features: Tensor, eta: float, add: bool) -> None:
        """Put η times the products with features (n, D) into `out` (groups, Q, n), or add them to it."""
        facing = features[:, self.at.columns].unflatten(1, (len(self.queries), -1)).transpose(0, 1)
        large = self.queries[0].numel() * len(features) >= _LARGE
        if not (large and faster_by_onednn(self.queries[0], self.queries[0])):
            out.baddbmm_(self.queries, facing.mT, alpha=eta, beta=int(add))
            return
        for part, q, f in zip(out, self.queries, facing):
            product = times(q, f.contiguous())
            part.add_(product, alpha=eta) if add else torch.mul(product, eta, out=part)


@dataclass(frozen=True, eq=False)
class QuerySide:
    """Queries as they are multiplied with blocks of training features."""

    train: TrainFeatures
    queries: Tensor  # (C, Q, D)
    partition: Groups

    def apply_weights(self, w: Tensor) -> Tensor:
        """(C, Q, D) query features, each column times η_c and the weight of its group."""
        column = torch.empty(self.queries.shape[2])
        for j, c in self.runs:
            column[c] = w[j]
        eta = torch.tensor(self.train.checkpoint_weights, dtype=torch.float32)
        device = self.train.device
        return put(self.queries, device) * put((eta.unsqueeze(1) * column).unsqueeze(1), device)

    def precondition(self, w: Tensor) -> Tensor:
        """(C, Q, D): what is multiplied with blocks for weighted totals."""
        weighted = self.apply_weights(w)
        if self.train.kernel_blocks is None:
            return weighted
        return torch.stack([self.train.apply_kernel(c, rows) for c, rows in enumerate(weighted)])

    def factors(self, queries: slice) -> list[list[QueryFactor]]:
        """For each checkpoint, what is multiplied with which columns for which groups."""
        features = put(self.queries[:, queries], self.train.device)
        if self.train.kernel_blocks is None:
            return [[_factor(q, at) for at in batches(self.runs)] for q in features]
        return [self._precondition_groups(c, q) for c, q in enumerate(features)]

    def _precondition_groups(self, checkpoint: int, q: Tensor) -> list[QueryFactor]:
        """K(1_j ⊙ g(q)), for as many groups j at once as share no block of K."""
        factors, seen = list[QueryFactor](), set[int]()
        for mask, runs in self.passes:
            product = self.train.apply_kernel(checkpoint, q if mask is None else q * mask)
            factors += [_factor(product, at) for at in batches(runs, seen)]
        return factors

    @cached_property
    def passes(self) -> list[tuple[Tensor | None, list[Run]]]:
        """Masks over columns, no two groups of one block of K under the same, and the runs they reach.

        One mask that is None where groups are unions of blocks: K g(q) is cut then.
        """
        assert self.train.kernel_blocks is not None
        units = list(zip(self.partition.of(self.train.units), self.train.columns))
        starts = [c.start for _, c in units]
        columns: list[list[slice]] = []
        reached: list[list[Run]] = []
        for block in self.train.kernel_blocks:
            inside = [
                u for c in block for u in units[bisect_left(starts, c.start) : bisect_left(starts, c.stop)]
            ]
            for i, j in enumerate(dict.fromkeys(j for j, _ in inside)):
                if i == len(columns):
                    columns.append([])
                    reached.append([])
                columns[i] += [c for owner, c in inside if owner == j]
                reached[i] += [(j, c) for c in block]
        masks = [None] if len(columns) == 1 else [self._mask(c) for c in columns]
        return [(mask, join(sorted(runs, key=_start))) for mask, runs in zip(masks, reached)]

    def _mask(self, columns: Iterable[slice]) -> Tensor:
        out = torch.zeros(self.queries.shape[2])
        for c in columns:
            out[c] = 1
        return put(out, self.train.device)

    @cached_property
    def runs(self) -> list[Run]:
        """(group, columns), where neighbouring parameters of one group are one run."""
        return join(zip(self.partition.of(self.train.units), self.train.columns))

    @cached_property
    def squared_norms(self) -> Tensor:
        """(Q, M) squared norms of the features of each group, summed over checkpoints with η."""
        out = torch.zeros(self.queries.shape[1], len(self.partition), device=self.train.device)
        for eta, q in zip(self.train.checkpoint_weights, self.queries):
            for j, c in self.runs:
                out[:, j] += eta * put(q[:, c], out.device).square().sum(1)
        return out


def multiply(out: Tensor, queries: Tensor, features: Tensor, add: bool) -> None:
    """Put the products of queries (q, D) and features (n, D) into `out` (q, n), or add them to it."""
    if faster_by_onednn(queries, features):
        product = times(queries, features)
        out.add_(product) if add else out.copy_(product)
    else:
        out.addmm_(queries, features.T, beta=int(add))


def sum_products(queries: Sequence[Tensor] | Tensor, blocks: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """(q, n): products of queries (q, D) and blocks (n, D), summed over checkpoints; in `out` unless that is None."""
    out = blocks[0].new_empty(len(queries[0]), len(blocks[0])) if out is None else out
    for c, (q, block) in enumerate(zip(queries, blocks)):
        multiply(out, q, block, add=c > 0)
    return out


def multiply_groups(
    etas: Sequence[float],
    factors: Sequence[Sequence[QueryFactor]],
    blocks: Sequence[Tensor],
    shape: tuple[int, int, int],
    out: Tensor | None,
) -> Tensor:
    """Contributions of `shape` (M, q, n), of blocks (n, D), one for each checkpoint; in `out` unless that is None."""
    for c, (eta, of_checkpoint, block) in enumerate(zip(etas, factors, blocks)):
        for factor in of_checkpoint:
            out = blocks[0].new_empty(shape) if out is None else out
            factor.multiply(out[factor.at.groups], block, eta, c > 0 or factor.at.add)
    out = blocks[0].new_empty(shape) if out is None else out
    for j in set(range(shape[0])) - {j for f in factors[0] for j in range(shape[0])[f.at.groups]}:
        out[j].zero_()  # a group without columns
    return out


def join(runs: Iterable[Run]) -> list[Run]:
    """Neighbouring columns of one group as one run."""
    out: list[Run] = []
    for j, c in runs:
        if out and out[-1][0] == j and out[-1][1].stop == c.start:
            out[-1] = (j, slice(out[-1][1].start, c.stop))
        else:
            out.append((j, c))
    return out


def batches(runs: Iterable[Run], seen: set[int] | None = None) -> list[GroupBatch]:
    """Runs in their order, neighbours of one size together; `seen` are groups that had columns before.

    >>> [(b.groups, b.columns) for b in batches([(0, slice(0, 4)), (1, slice(4, 8)), (2, slice(8, 9))])]
    [(slice(0, 2, None), slice(0, 8, None)), (slice(2, 3, None), slice(8, 9, None))]
    """
    seen, out, width = set() if seen is None else seen, list[GroupBatch](), 0
    for j, c in runs:
        if c.start == c.stop:
            continue
        last, add = out[-1] if out else None, j in seen
        follows = last is not None and (last.groups.stop, last.columns.stop, last.add) == (j, c.start, add)
        if last is not None and follows and c.stop - c.start == width:
            out[-1] = GroupBatch(slice(last.groups.start, j + 1), slice(last.columns.start, c.stop), add)
        else:
            out.append(GroupBatch(slice(j, j + 1), c, add))
        width = c.stop - c.start
        seen.add(j)
    return out


def _start(run: Run) -> int:
    return run[1].start


def _factor(q: Tensor, at: GroupBatch) -> QueryFactor:
    count = at.groups.stop - at.groups.start
    return QueryFactor(at, q[:, at.columns].unflatten(1, (count, -1)).transpose(0, 1).contiguous())
