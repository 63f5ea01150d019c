"""Scores and training features in arrays: in memory or mapped from disk, of this package or any other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.default_device import host_default
from unde.errors import UndeError
from unde.scoring.base import Scores, WeightsLike, pick
from unde.scoring.blocks import TopK, cut, rows_per_block
from unde.scoring.train_features import TrainFeatures

ALL = "all"  # the one group of scores that are not resolved
MEMORY = 2**30
Array = Tensor | np.ndarray


class ArrayFeatures(TrainFeatures):
    """Training features in memory, in blocks of `block_rows` examples.

    Args:
        values: Features (C, N, D), or (N, D) of one checkpoint.
        units: Parameters and the number of columns of each, in order.
        checkpoint_weights: η_c of each checkpoint, by default 1.
        block_rows: Training examples of a block.
        ids: Names of the training examples.
        skipped: Training examples that are left out, by position.
    """

    def __init__(
        self,
        values: Tensor,
        units: Mapping[str, int],
        *,
        checkpoint_weights: Sequence[float] | None = None,
        block_rows: int = 4096,
        ids: Sequence[Any] | None = None,
        skipped: Sequence[int] = (),
    ) -> None:
        self.values = values if values.ndim == 3 else values[None]
        ends = np.cumsum(list(units.values())).tolist()
        self.units, self.columns = list(units), [slice(a, b) for a, b in zip([0, *ends], ends)]
        self.checkpoint_weights = list(checkpoint_weights or [1.0] * len(self.values))
        self.cuts = list(cut(slice(0, self.values.shape[1]), block_rows))
        self.ids = ids
        self._skipped = torch.zeros(self.values.shape[1], dtype=torch.bool)
        self._skipped[list(skipped)] = True

    def block(self, s: int) -> list[Tensor]:
        return [rows[self.cuts[s]] for rows in self.values]

    def skipped(self) -> Tensor:
        return self._skipped


@dataclass(frozen=True)
class Additive:
    """A method whose scores are plain sums over groups."""

    name: str = "additive"
    linear: bool = True


@host_default
@dataclass(frozen=True, repr=False, eq=False)
class ArrayScores(Scores):
    """Scores (Q, N, M) of Q queries against N training examples, sums over M groups; `from_arrays` makes them.

    The array may be larger than memory, such as a memory map: it is read in blocks of at most `memory` bytes.
    """

    values: Array  # (Q, N, M)
    names: Sequence[str]  # of the M groups
    memory: int = MEMORY
    ids: Sequence[Any] | None = None
    query_ids: Sequence[Any] | None = None
    method: Any = Additive()
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.values.ndim != 3 or self.values.shape[2] != len(self.names):
            raise UndeError(
                f"contributions have shape {tuple(self.values.shape)}: expected (queries, training examples, "
                f"{len(self.names)}), since {len(self.names)} group names were given"
            )
        if isinstance(self.values, Tensor):
            object.__setattr__(self, "values", self.values.float())

    @property
    def groups(self) -> list[str]:
        """Names of the M groups, in order."""
        return list(self.names)

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @cached_property
    def query_digests(self) -> list[str]:
        """Digests of the scores of each query, which tell it from others."""
        return [hashlib.sha256(self._row(q).numpy()).hexdigest()[:16] for q in range(len(self))]

    def _row(self, q: int) -> Tensor:
        return self.contributions(slice(q, q + 1))[0].cpu().contiguous()

    # --- scores ----------------------------------------------------------------------------------------

    def total(self, weights: WeightsLike = None) -> Tensor:
        """(Q, N) scores, held beside the memory budget; positive = proponent."""
        w, out = self.align_weights(weights), torch.empty(self.shape)
        for q in self._query_blocks(8):
            for rows, parts in self.stream(q):
                out[q, rows] = parts[:, :, 0] * w[0] if len(w) == 1 else (parts.cpu() @ w)
        return out

    def rank(self, w: Tensor, k: int, largest: bool) -> TopK:
        best = TopK(len(self), k, largest)
        for q in self._query_blocks(16):
            best.update(q, 0, self.select(torch.arange(q.start, q.stop)).total(w))
        return best

    def select(self, queries: Tensor) -> ArrayScores:
        """The scores of some of the queries, by number."""
        values = self.values[queries if isinstance(self.values, Tensor) else queries.numpy()]
        return replace(self, values=values, query_ids=pick(self.query_ids, queries))

    def by_group(self) -> Tensor:
        """(Q, N, M), all in memory."""
        return self.contributions(slice(0, len(self)))

    def regroup(self, groups: Mapping[str, Sequence[str]]) -> ArrayScores:
        """The same scores under coarser groups, {new name: names of present groups}; in memory."""
        return replace(self, values=self.by_group() @ self._joint_groups(groups), names=list(groups))

    # --- blocks, for the weight learner -----------------------------------------------------------------

    def _query_blocks(self, each: int) -> Iterator[slice]:
        """Queries whose contributions take `each` bytes of the budget a number."""
        return cut(slice(0, len(self)), max(1, self.memory // (each * self.shape[1] * len(self.names))))

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """(training examples, (q, n, M) contributions); all at once where they are in memory."""
        examples, count = self.shape[1], len(range(*queries.indices(len(self))))
        in_memory = isinstance(self.values, Tensor)
        step = examples if in_memory else rows_per_block(count, len(self.names), self.memory)
        for rows in cut(slice(0, examples), max(1, step)):
            yield rows, _float(self.values[queries, rows])

    def contributions(self, queries: slice) -> Tensor:
        """(q, N, M)"""
        return _float(self.values[queries])

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        """The linear scores unchanged: scores are sums over groups."""
        return linear


def from_arrays(
    values: Any,
    *,
    groups: Sequence[str] | None = None,
    ids: Sequence[Any] | None = None,
    query_ids: Sequence[Any] | None = None,
    name: str = "arrays",
    memory: int = MEMORY,
) -> ArrayScores:
    """Scores of any library, for `learn_weights`, `evaluate` and pages.

    Args:
        values: Scores (Q, N), or (Q, N, M) resolved into M groups that add up to the score: an array, a tensor or a
            memory map, which is read once here and in blocks later. Positive = proponent: negate scores of the other
            sign. Transpose (N, Q) first.
        groups: Names of the groups.
        ids: Names of the training examples.
        query_ids: Names of the queries.
        name: What computed them.
        memory: Bytes of blocks that are read at once.

    Returns:
        The scores, with `total`, `top`, `by_group` and `regroup`.

    Raises:
        UndeError: If shapes and names do not fit, or a score is not finite.

    >>> values = torch.tensor([[[1.0, 2.0], [3.0, -1.0]]])
    >>> scores = from_arrays(values, groups=["body", "head"], ids=["a", "b"])
    >>> scores.total(), scores.top(1).ids
    (tensor([[3., 2.]]), [['a']])
    """
    array = values.detach() if isinstance(values, Tensor) else np.asanyarray(values)
    shape = tuple(array.shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise UndeError(
            f"scores of shape {shape}: expected (queries, training examples), or (queries, training examples, groups), "
            "none of them empty"
        )
    real = not array.is_complex() if isinstance(array, Tensor) else array.dtype.kind in "fiub"
    if not real:
        raise UndeError(f"scores of type {array.dtype}: expected real numbers")
    if len(shape) == 2:
        if groups is not None and len(groups) != 1:
            raise UndeError(
                f"{len(groups)} group names for scores of shape {shape}, which are not resolved into groups: expected "
                "(queries, training examples, groups)"
            )
        array = array[:, :, None]
    names = list(groups) if groups is not None else _default_groups(shape)
    if len(names) != array.shape[2] or len(set(names)) < len(names):
        raise UndeError(
            f"{len(names)} group names for {array.shape[2]} groups: expected a name of its own for each"
        )
    _check_ids("ids", ids, shape, 1)
    _check_ids("query_ids", query_ids, shape, 0)
    scores = ArrayScores(array, names, memory, ids, query_ids, Additive(name), {"method": {"name": name}})
    _check_finite(scores)
    return scores


def as_scores(scores: Any) -> Any:
    """Bare arrays as scores; scores unchanged."""
    return from_arrays(scores) if isinstance(scores, (Tensor, np.ndarray)) else scores


def _default_groups(shape: Sequence[int]) -> list[str]:
    return [ALL] if len(shape) == 2 else [f"group {j}" for j in range(shape[2])]


def _check_ids(what: str, ids: Sequence[Any] | None, shape: Sequence[int], axis: int) -> None:
    if ids is not None and len(ids) != shape[axis]:
        transposed = len(ids) == shape[1 - axis]
        hint = ". The array looks transposed: pass it with queries first" if transposed else ""
        raise UndeError(f"{len(ids)} {what} for scores of shape {tuple(shape)}: expected {shape[axis]}{hint}")


def _check_finite(scores: ArrayScores) -> None:
    for q in scores._query_blocks(16):
        for rows, parts in scores.stream(q):
            if not torch.stack(torch.aminmax(parts)).isfinite().all():
                a, b, j = (~parts.isfinite()).nonzero()[0].tolist()
                where = f"query {q.start + a}, training example {rows.start + b}"
                where += "" if scores.groups == [ALL] else f", group {scores.groups[j]!r}"
                raise UndeError(
                    f"scores are NaN, infinite or beyond the range of float32, the first at {where}: find out where "
                    "they broke, or leave that query or example out"
                )


def _float(values: Array) -> Tensor:
    if isinstance(values, Tensor):
        return values
    with np.errstate(over="ignore"):  # infinite then, which `_check_finite` finds
        return torch.from_numpy(np.array(values, dtype=np.float32, copy=True))
