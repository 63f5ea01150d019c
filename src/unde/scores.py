"""Scores: group-resolved attributions, streamed over training blocks; totals, top-k, regrouping (Eq. 4).

    linear(q, n; w) = Σ_c η_c Σ_j w_j ⟨ g_j(q), [K g(n)]_j ⟩         total = final(linear)

Weights act on the query side, so a weighted total is one matrix product, as an unweighted one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unde.errors import UndeError, unknown
from unde.groups import Groups
from unde.methods import Method, Sides

if TYPE_CHECKING:
    from unde.weights import Weights

    WeightsLike = Weights | Tensor | Sequence[float] | None


@dataclass(frozen=True)
class Top:
    """The k best training examples of each query, best first; of equal scores the earlier example first."""

    indices: Tensor  # (Q, k)
    values: Tensor  # (Q, k)
    ids: list[list[Any]]  # (Q, k), the user's ids if the index has them


def _unknown() -> Tensor:
    raise UndeError("this training side knows neither leverages nor residuals: score through an Index")


@dataclass(frozen=True)
class TrainSide:
    """What scores need to know of the training side of an index."""

    examples: int
    units: Sequence[str]
    columns: Sequence[slice]  # of each unit
    checkpoint_weights: Sequence[float]  # η_c
    cuts: Sequence[slice]  # the rows of each block
    block: Callable[[int], list[Tensor]]  # [K g(n)] of the rows cuts[s], (n, D) for each checkpoint
    squares: Callable[[], Tensor]  # (N, U): squared norms of the features, summed over checkpoints with η
    skipped: Callable[[], Tensor]  # (N,) bool
    ids: Sequence[Any] | None
    leverage: Callable[[], Tensor] = _unknown  # (N,): ⟨g(n), K g(n)⟩
    also: Callable[[], Tensor] = _unknown  # (N, ·): what the method keeps beside features

    def blocks(self) -> Iterator[tuple[slice, list[Tensor]]]:
        return ((rows, self.block(s)) for s, rows in enumerate(self.cuts))


@dataclass(frozen=True, repr=False, eq=False)
class GroupScores:
    """Scores of Q queries against N training examples, resolved into M parameter groups."""

    train: TrainSide
    queries: Tensor  # (C, Q, D)
    method: Method
    partition: Groups
    query_digests: list[str]
    provenance: dict[str, Any]
    memory: int
    judging: Callable[[Groups], Any] | None = None  # self-retrieval of the same method, where it can be run

    def judge(self) -> Any:
        """What tells good weights from bad ones, or None without model and training data (`index.self_retrieval`)."""
        return None if self.judging is None else self.judging(self.partition)

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
        return f"GroupScores({self.method}, {q} queries × {n} examples × {len(self.partition)} groups)"

    # --- scores ----------------------------------------------------------------------------------------

    def total(self, weights: WeightsLike = None) -> Tensor:
        """(Q, N) scores, one matrix product; positive = proponent."""
        out = torch.empty(self.shape)
        for rows, q, part in self._totals(self.weights(weights)):
            out[q, rows] = part
        return out

    def top(self, k: int, weights: WeightsLike = None, largest: bool = True) -> Top:
        """The k largest scores of each query (largest=False: the k smallest, opponents); only k are kept."""
        skipped = self.train.skipped()
        usable = self.train.examples - int(skipped.sum())
        if not 1 <= k <= usable:
            left_out = f" ({self.train.examples - usable} more were skipped)" if skipped.any() else ""
            raise UndeError(f"top({k}) of {usable} training examples{left_out}: expected 1 ≤ k ≤ {usable}")
        worst = -torch.inf if largest else torch.inf
        values, indices = torch.empty(len(self), k), torch.empty(len(self), k, dtype=torch.long)
        for rows, q, part in self._totals(self.weights(weights)):
            have, keep = min(k, rows.start), min(k, rows.stop)
            part = part.masked_fill(skipped[rows], worst)
            best, at = _stable_top(part, min(k, part.shape[1]), largest)
            best = torch.cat([values[q, :have], best], 1)
            number = torch.cat([indices[q, :have], at + rows.start], 1)
            values[q, :keep], at = _stable_top(best, keep, largest)
            indices[q, :keep] = number.gather(1, at)
        ids = indices.tolist()
        if self.train.ids is not None:
            ids = [[self.train.ids[i] for i in row] for row in ids]
        return Top(indices, values, ids)

    def by_group(self) -> Tensor:
        """(Q, N, M): the contributions of the groups, before `final`. For small problems: all in memory."""
        q, n = self.shape
        need = 4 * q * n * len(self.partition)
        if need > self.memory:
            raise UndeError(
                f"by_group() of {q} × {n} × {len(self.partition)} needs {need / 2**30:.3g} GiB, the budget "
                f"is {self.memory / 2**30:.3g} GiB: score fewer queries, regroup, or raise memory="
            )
        return self.contributions(slice(0, q))

    # --- blocks, for the weight learner -----------------------------------------------------------------

    def contributions(self, queries: slice) -> Tensor:
        """(q, N, M) linear contributions of a block of queries."""
        count = len(range(*queries.indices(len(self))))
        out = torch.empty(count, self.train.examples, len(self.partition))
        for rows, part in self.stream(queries):
            out[:, rows] = part
        return out

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """(training rows, (q, n, M) contributions), block by block within the memory budget."""
        features = self.queries[:, queries]
        m, count = len(self.partition), max(1, features.shape[1])
        step = max(1, self.memory // (8 * count * m))
        for rows, blocks in self.train.blocks():
            for start in range(rows.start, rows.stop, step):
                stop = min(start + step, rows.stop)
                here = slice(start - rows.start, stop - rows.start)
                out = torch.zeros(m, features.shape[1], stop - start)
                for eta, q, block in zip(self.train.checkpoint_weights, features, blocks):
                    for j, c in self._runs:
                        out[j].addmm_(q[:, c], block[here, c].T, alpha=eta)
                parts, taken = out.permute(1, 2, 0).contiguous(), slice(start, stop)
                if self.method.groupwise:
                    parts = self.method.by_group(parts, self._sides(queries, taken))
                yield taken, parts

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice | Tensor) -> Tensor:
        """Final scores from the linear part of a block; differentiable in `weights` (M,)."""
        if self.method.linear:
            return linear
        return self.method.final(linear, self._sides(queries, train), weights.to(linear))

    def _sides(self, queries: slice, train: slice | Tensor) -> Sides:
        return Sides(
            query_squares=lambda: self._query_squares[queries],
            train_squares=lambda: self._train_squares[train],
            leverage=lambda: self._leverage[train],
            also=lambda: self._also[train],
        )

    def _totals(self, w: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """(training rows, queries, their scores), block by block, rows in order."""
        if self.method.groupwise:  # weights act on what is no longer linear in the features
            step = max(
                1, self.memory // (16 * len(self.partition) * max(r.stop - r.start for r in self.train.cuts))
            )
            blocks = [slice(a, min(a + step, len(self))) for a in range(0, len(self), step)]
            streams = [self.stream(q) for q in blocks]
            for found in zip(*streams):
                for q, (rows, parts) in zip(blocks, found):
                    yield rows, q, parts @ w
            return
        scaled = self.scaled(w)
        for rows, blocks in self.train.blocks():
            for q in self._query_blocks(rows):
                yield rows, q, self.finish(_linear(scaled[:, q], blocks), w, q, rows)

    def own(self, transformed: Tensor, train: Tensor) -> Tensor:
        """(n, M) contributions of queries to themselves: they are the training examples `train`, with K g (C, n, D)."""
        parts = torch.zeros(len(self), len(self.partition))
        for eta, q, t in zip(self.train.checkpoint_weights, self.queries, transformed):
            for j, c in self._runs:
                parts[:, j] += eta * torch.linalg.vecdot(q[:, c], t[:, c])
        square = torch.diag_embed(parts.T).permute(1, 2, 0)  # (n, n, M), zero off the diagonal
        made = self.method.by_group(square, self._sides(slice(0, len(self)), train))
        return made.diagonal().T

    # --- groups -----------------------------------------------------------------------------------------

    def regroup(self, groups: Groups | Mapping[str, Sequence[str]]) -> GroupScores:
        """The same scores under another partition of the parameters: no second pass over the model.

        `groups` is a Groups over the same parameters, or {new name: names of groups of this one}.
        """
        if not isinstance(groups, Groups):
            for name in (name for names in groups.values() for name in names):
                if name not in self.partition.members:
                    raise unknown("group", name, self.groups)
            members = self.partition.members
            groups = Groups({new: tuple(p for g in old for p in members[g]) for new, old in groups.items()})
        groups.of(self.train.units)
        return replace(self, partition=groups)

    # --- inside -----------------------------------------------------------------------------------------

    def weights(self, weights: WeightsLike) -> Tensor:
        """(M,) from whatever names them; None is all ones."""
        m = len(self.partition)
        if weights is None:
            return torch.ones(m)
        aligned = getattr(weights, "aligned_to", None)
        values = torch.as_tensor(aligned(self.groups) if aligned else weights, dtype=torch.float32).cpu()
        if values.shape != (m,):
            raise UndeError(f"weights of shape {tuple(values.shape)} for {m} groups: expected ({m},)")
        if not (values.isfinite() & (values >= 0)).all():
            raise UndeError("weights must be finite numbers ≥ 0, one for each group")
        return values

    def scaled(self, w: Tensor) -> Tensor:
        """Query features with η_c and the weight of its group on each column, (C, Q, D)."""
        column = torch.empty(self.queries.shape[2])
        for j, c in self._runs:
            column[c] = w[j]
        eta = torch.tensor(self.train.checkpoint_weights, dtype=torch.float32)
        return self.queries * (eta.unsqueeze(1) * column).unsqueeze(1)

    @cached_property
    def _runs(self) -> list[tuple[int, slice]]:
        """(group, columns), where neighbouring units of one group are one run."""
        runs: list[tuple[int, slice]] = []
        for j, c in zip(self.partition.of(self.train.units), self.train.columns):
            if runs and runs[-1][0] == j:
                runs[-1] = (j, slice(runs[-1][1].start, c.stop))
            else:
                runs.append((j, c))
        return runs

    def _query_blocks(self, rows: slice) -> Iterator[slice]:
        step = max(1, self.memory // (16 * (rows.stop - rows.start)))
        return (slice(a, min(a + step, len(self))) for a in range(0, len(self), step))

    @cached_property
    def _query_squares(self) -> Tensor:
        """(Q, M): as `train.squares`, of the queries."""
        out = torch.zeros(len(self), len(self.partition))
        for eta, q in zip(self.train.checkpoint_weights, self.queries):
            for j, c in self._runs:
                out[:, j] += eta * q[:, c].square().sum(1)
        return out

    @cached_property
    def _leverage(self) -> Tensor:
        return self.train.leverage()

    @cached_property
    def _also(self) -> Tensor:
        return self.train.also()

    @cached_property
    def _train_squares(self) -> Tensor:
        """(N, M)"""
        out = torch.zeros(self.train.examples, len(self.partition))
        return out.index_add_(1, torch.tensor(self.partition.of(self.train.units)), self.train.squares())


def _linear(scaled: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    out = scaled[0] @ blocks[0].T
    for q, block in zip(scaled[1:], blocks[1:]):
        out.addmm_(q, block.T)
    return out


def _stable_top(values: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """As topk, but of equal values the earlier ones, in their order."""
    best, at = values.topk(k, largest=largest)
    last = best[:, -1:]
    beaten_or_equal = (values >= last) if largest else (values <= last)
    tied = (beaten_or_equal.sum(1) > k).nonzero()[:, 0]  # rows where topk chose among equals
    if len(tied):
        at[tied] = values[tied].sort(stable=True, dim=1, descending=largest).indices[:, :k]
    at = at.sort(1).values
    best, order = values.gather(1, at).sort(stable=True, dim=1, descending=largest)
    return best, at.gather(1, order)
