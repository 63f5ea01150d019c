"""Scores: group-resolved attributions, streamed over training blocks; totals, top-k, regrouping (Eq. 4).

    linear(q, n; w) = Σ_c η_c Σ_j w_j ⟨ g_j(q), [K g(n)]_j ⟩         total = final(linear)

Weights act on the query side, so a weighted total is one matrix product, as an unweighted one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence.errors import WhenceError
from whence.groups import Groups
from whence.methods import Method

if TYPE_CHECKING:
    from whence.weights import Weights


@dataclass(frozen=True)
class Top:
    """The k best training examples of each query, best first."""

    indices: Tensor  # (Q, k)
    values: Tensor  # (Q, k)
    ids: list[list[Any]]  # (Q, k), the user's ids if the index has them


@dataclass(frozen=True)
class TrainSide:
    """What scores need to know of the training side of an index."""

    examples: int
    units: Sequence[str]
    columns: Sequence[slice]
    checkpoint_weights: Sequence[float]
    blocks: Callable[[], Iterator[tuple[slice, list[Tensor]]]]  # rows, [K g(n)] (n, D) for each checkpoint
    squares: Callable[[], Tensor]  # (N, U): squared norms of the features, summed over checkpoints with η
    skipped: Callable[[], Tensor]  # (N,) bool
    ids: Sequence[Any] | None


@dataclass(frozen=True)
class GroupScores:
    """Scores of Q queries against N training examples, resolved into M parameter groups."""

    train: TrainSide
    queries: Tensor  # (C, Q, D)
    method: Method
    partition: Groups
    query_digests: list[str]
    provenance: dict[str, Any]
    memory: int

    @property
    def groups(self) -> list[str]:
        """The M group names, in order."""
        return list(self.partition.names)

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.shape[1], self.train.examples

    def __len__(self) -> int:
        return self.queries.shape[1]

    def __repr__(self) -> str:
        q, n = self.shape
        return f"GroupScores({self.method}, {q} queries × {n} training examples × {len(self.partition)} groups)"

    # --- scores ----------------------------------------------------------------------------------------

    def total(self, weights: Weights | Tensor | Sequence[float] | None = None) -> Tensor:
        """(Q, N) scores, one matrix product; positive = proponent."""
        w = self._weights(weights)
        scaled, out = self._scaled(w), torch.empty(self.shape)
        for rows, blocks in self.train.blocks():
            out[:, rows] = self._linear(scaled, blocks)
        for q in self._query_blocks(self.train.examples):
            out[q] = self.finish(out[q], w, q, slice(0, self.train.examples))
        return out

    def top(self, k: int, weights: Weights | Tensor | Sequence[float] | None = None, largest: bool = True) -> Top:
        """The k largest scores of each query (largest=False: the k smallest, opponents); only k are kept."""
        if not 1 <= k <= self.train.examples:
            raise WhenceError(f"top({k}) of {self.train.examples} training examples: expected 1 ≤ k ≤ N")
        w = self._weights(weights)
        scaled, skipped = self._scaled(w), self.train.skipped()
        values = torch.empty(len(self), 0)
        indices = torch.empty(len(self), 0, dtype=torch.long)
        for rows, blocks in self.train.blocks():
            part = self.finish(self._linear(scaled, blocks), w, slice(0, len(self)), rows)
            part = part.masked_fill(skipped[rows], -torch.inf if largest else torch.inf)
            number = torch.arange(rows.start, rows.stop).expand_as(part)
            values, indices = torch.cat([values, part], 1), torch.cat([indices, number], 1)
            values, best = values.topk(min(k, values.shape[1]), largest=largest)
            indices = indices.gather(1, best)
        ids = indices.tolist()
        if self.train.ids is not None:
            ids = [[self.train.ids[i] for i in row] for row in ids]
        return Top(indices, values, ids)

    def by_group(self) -> Tensor:
        """(Q, N, M): the linear part group by group, before `final`. For small problems: all of it in memory."""
        q, n = self.shape
        need = 4 * q * n * len(self.partition)
        if need > self.memory:
            raise WhenceError(
                f"by_group() of {q} × {n} × {len(self.partition)} needs {need / 2**30:.1f} GiB, the budget is "
                f"{self.memory / 2**30:.1f} GiB: score fewer queries, regroup, or raise memory= of the index"
            )
        return self.contributions(slice(0, q))

    # --- blocks, for the weight learner -----------------------------------------------------------------

    def contributions(self, queries: slice) -> Tensor:
        """(q, N, M) linear contributions of a block of queries."""
        return torch.cat([part for _, part in self.stream(queries)], 1)

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """(training rows, (q, n, M) linear contributions), block by block within the memory budget."""
        features = self.queries[:, queries]
        group_of = self.partition.of(self.train.units)
        m = len(self.partition)
        step = max(1, self.memory // (8 * max(1, features.shape[1]) * m))
        for rows, blocks in self.train.blocks():
            for start in range(0, rows.stop - rows.start, step):
                stop = min(start + step, rows.stop - rows.start)
                out = torch.zeros(m, features.shape[1], stop - start)
                for eta, q, block in zip(self.train.checkpoint_weights, features, blocks):
                    for j, c in zip(group_of, self.train.columns):
                        out[j].addmm_(q[:, c], block[start:stop, c].T, alpha=eta)
                yield slice(rows.start + start, rows.start + stop), out.permute(1, 2, 0).contiguous()

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        """Final scores from the linear part of a block; differentiable in `weights` (M,)."""
        if self.method.linear:
            return linear
        q = self._to_groups(self._query_squares()[queries])
        n = self._to_groups(self.train.squares()[train])
        return self.method.final(linear, q, n, weights.to(linear.dtype))

    # --- groups -----------------------------------------------------------------------------------------

    def regroup(self, groups: Groups | Mapping[str, Sequence[str]]) -> GroupScores:
        """The same scores under another partition of the parameters: no second pass over the model.

        `groups` is a Groups over the same parameters, or {new name: names of groups of this one}.
        """
        if not isinstance(groups, Groups):
            unknown = [g for names in groups.values() for g in names if g not in self.partition.members]
            if unknown:
                raise WhenceError(f"regroup names {unknown[0]!r}, which is not one of the groups {self.groups}")
            groups = Groups(
                {new: tuple(p for g in names for p in self.partition.members[g]) for new, names in groups.items()}
            )
        groups.of(self.train.units)
        return replace(self, partition=groups)

    # --- inside -----------------------------------------------------------------------------------------

    def _weights(self, weights: Weights | Tensor | Sequence[float] | None) -> Tensor:
        m = len(self.partition)
        if weights is None:
            return torch.ones(m)
        aligned = getattr(weights, "aligned_to", None)
        values = aligned(self.groups) if aligned else torch.as_tensor(weights, dtype=torch.float32)
        values = values.to(torch.float32)
        if values.shape != (m,):
            raise WhenceError(f"weights of shape {tuple(values.shape)} for {m} groups: expected ({m},)")
        if not (values >= 0).all():
            raise WhenceError("weights must be non-negative numbers, one for each group")
        return values

    def _scaled(self, w: Tensor) -> Tensor:
        """Query features with η_c and the weight of its group on each column, (C, Q, D)."""
        column = torch.empty(self.queries.shape[2])
        for j, c in zip(self.partition.of(self.train.units), self.train.columns):
            column[c] = w[j]
        eta = torch.tensor(self.train.checkpoint_weights, dtype=torch.float32)
        return self.queries * column * eta[:, None, None]

    @staticmethod
    def _linear(scaled: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        out = scaled[0] @ blocks[0].T
        for q, block in zip(scaled[1:], blocks[1:]):
            out.addmm_(q, block.T)
        return out

    def _query_blocks(self, n: int) -> Iterator[slice]:
        step = max(1, self.memory // (16 * n))
        return (slice(a, min(a + step, len(self))) for a in range(0, len(self), step))

    def _query_squares(self) -> Tensor:
        eta = torch.tensor(self.train.checkpoint_weights, dtype=torch.float32)
        squares = (self.queries.square() * eta[:, None, None]).sum(0)  # (Q, D)
        return torch.stack([squares[:, c].sum(1) for c in self.train.columns], 1)  # (Q, U)

    def _to_groups(self, per_unit: Tensor) -> Tensor:
        out = torch.zeros(per_unit.shape[0], len(self.partition))
        return out.index_add_(1, torch.tensor(self.partition.of(self.train.units)), per_unit)
