"""Scores that are there already, of this package or any other, wherever scores are accepted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.errors import UndeError, unknown
from unde.notebook import facts, listed
from unde.scoring import budget
from unde.scoring.blocking import cut
from unde.scoring.ranked import Ranked, WeightsLike
from unde.scoring.top import Best

ALL = "all"  # the one group of scores that are not resolved
MEMORY = 2**30
Array = Tensor | np.ndarray


@dataclass(frozen=True)
class Additive:
    """A method whose scores are plain sums over groups."""

    name: str = "additive"
    linear: bool = True


class ArrayScores(Ranked):
    """Scores (Q, N, M) of Q queries against N training examples, sums over M groups; made by `from_arrays`.

    What is held may be larger than memory, such as a memory map: it is read in blocks of at most `memory` bytes.
    """

    def __init__(
        self,
        values: Array,
        groups: Sequence[str],
        memory: int = MEMORY,
        *,
        ids: Sequence[Any] | None = None,
        query_ids: Sequence[Any] | None = None,
        method: Any = None,
        provenance: dict[str, Any] | None = None,
    ) -> None:
        if values.ndim != 3 or values.shape[2] != len(groups):
            raise UndeError(
                f"contributions have shape {tuple(values.shape)}: expected (queries, training examples, "
                f"{len(groups)}), since {len(groups)} group names were given"
            )
        self.values = values.float() if isinstance(values, Tensor) else values  # (Q, N, M)
        self._groups, self._ids, self._query_ids = list(groups), ids, query_ids
        self._memory = memory
        self.method: Any = method or Additive()
        self.provenance = provenance or {}

    @property
    def groups(self) -> list[str]:
        """The M group names, in order."""
        return list(self._groups)

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        q, n = self.shape
        return f"ArrayScores({self.method.name}, {q} queries × {n} examples × {len(self._groups)} groups)"

    def _repr_html_(self) -> str:
        q, n = self.shape
        found = {"made by": str(self.method.name), "queries": f"{q:,}", "training examples": f"{n:,}"}
        return facts("Scores", found | {"groups": listed(self.groups)})

    @property
    def memory(self) -> int:
        return self._memory

    @property
    def query_ids(self) -> Sequence[Any] | None:
        return self._query_ids

    @property
    def ids(self) -> Sequence[Any] | None:
        return self._ids

    def skipped(self) -> Tensor:
        """None are."""
        return torch.zeros(self.shape[1], dtype=torch.bool)

    @cached_property
    def query_digests(self) -> list[str]:
        """Of the scores of each query, which tell it from others."""
        return [hashlib.sha256(self._row(q).numpy()).hexdigest()[:16] for q in range(len(self))]

    def _row(self, q: int) -> Tensor:
        return self.contributions(slice(q, q + 1))[0].cpu().contiguous()

    # --- scores ----------------------------------------------------------------------------------------

    def total(self, weights: WeightsLike = None) -> Tensor:
        """(Q, N) scores, on top of the memory budget; positive = proponent."""
        w, out = self.weights(weights), torch.empty(self.shape)
        for q in cut(slice(0, len(self)), max(1, self.memory // (8 * self.shape[1] * len(w)))):
            for rows, parts in self.stream(q):
                out[q, rows] = parts[:, :, 0] * w[0] if len(w) == 1 else (parts.cpu() @ w)
        return out

    def best_examples(self, w: Tensor, k: int, largest: bool) -> Best:
        best = Best(len(self), k, largest)
        for q in cut(slice(0, len(self)), max(1, self.memory // (16 * self.shape[1] * len(w)))):
            best.see(q, 0, self.picked(torch.arange(q.start, q.stop)).total(w))
        return best

    def picked(self, queries: Tensor) -> ArrayScores:
        names = None if self.query_ids is None else [self.query_ids[q] for q in queries.tolist()]
        some = self.values[queries if isinstance(self.values, Tensor) else queries.numpy()]
        return ArrayScores(
            some, self._groups, self.memory, ids=self._ids, query_ids=names, method=self.method,
            provenance=self.provenance,
        )  # fmt: skip

    def by_group(self) -> Tensor:
        """(Q, N, M), all in memory."""
        return self.contributions(slice(0, len(self)))

    def regroup(self, groups: Mapping[str, Sequence[str]]) -> ArrayScores:
        """The same under coarser groups, {new name: names of groups of this one}; in memory."""
        number = {name: j for j, name in enumerate(self._groups)}
        for name in (name for names in groups.values() for name in names):
            if name not in number:
                raise unknown("group", name, self._groups)
        used = [name for names in groups.values() for name in names]
        if sorted(used) != sorted(self._groups):
            raise UndeError(
                f"{len(used)} groups are named, there are {len(self._groups)}: expected each of them in one new group"
            )
        whole = self.by_group()
        made = torch.stack([whole[:, :, [number[n] for n in names]].sum(2) for names in groups.values()], 2)
        return ArrayScores(
            made, list(groups), self.memory, ids=self._ids, query_ids=self.query_ids, method=self.method,
            provenance=self.provenance,
        )  # fmt: skip

    # --- blocks, for the weight learner -----------------------------------------------------------------

    def stream(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """(training rows, (q, n, M) contributions); of what is in memory already, all rows at once."""
        examples, count = self.shape[1], len(range(*queries.indices(len(self))))
        held = isinstance(self.values, Tensor)
        step = examples if held else budget.rows_at_once(count, len(self._groups), self.memory)
        for rows in cut(slice(0, examples), max(1, step)):
            yield rows, _float(self.values[queries, rows])

    def contributions(self, queries: slice) -> Tensor:
        """(q, N, M)"""
        return _float(self.values[queries])

    def finish(self, linear: Tensor, weights: Tensor, queries: slice, train: slice) -> Tensor:
        """As they are: scores are sums over groups."""
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
    """Scores from anywhere, for `learn_weights`, `evaluate` and pages: (Q, N), or (Q, N, M) resolved into M groups.

    `values` are an array, a tensor or a memory map, which is read once here, and in blocks later. Positive = proponent:
    negate what has the other sign. Group scores add up to the score. `groups` names the groups, `ids` the training
    examples, `query_ids` the queries, `name` what made them. (N, Q) as other libraries have it is transposed first.

    >>> values = torch.tensor([[[1.0, 2.0], [3.0, -1.0]]])
    >>> scores = from_arrays(values, groups=["body", "head"], ids=["a", "b"])
    >>> scores.total(), scores.top(1).ids
    (tensor([[3., 2.]]), [['a']])
    """
    found = values if isinstance(values, (Tensor, np.ndarray)) else np.asarray(values)
    found = found.detach() if isinstance(found, Tensor) else found
    shape = tuple(found.shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise UndeError(
            f"scores of shape {shape}: expected (queries, training examples), or (queries, training examples, groups), "
            "none of them empty"
        )
    real = (
        found.dtype not in (torch.complex64, torch.complex128)
        if isinstance(found, Tensor)
        else found.dtype.kind in "fiub"
    )
    if not real:
        raise UndeError(f"scores of type {found.dtype}: expected real numbers")
    if len(shape) == 2:
        if groups is not None and len(groups) != 1:
            raise UndeError(
                f"{len(groups)} group names for scores of shape {shape}, which are not resolved into groups: expected "
                "(queries, training examples, groups)"
            )
        found = found[:, :, None]
    names = list(groups) if groups is not None else [ALL] if len(shape) == 2 else _numbered(shape[2])
    if len(names) != found.shape[2] or len(set(names)) < len(names):
        raise UndeError(
            f"{len(names)} group names for {found.shape[2]} groups: expected a name of its own for each"
        )
    for what, given, count, other in (
        ("ids", ids, shape[1], shape[0]),
        ("query_ids", query_ids, shape[0], shape[1]),
    ):
        if given is not None and len(given) != count:
            hint = ". The array looks transposed: pass it with queries first" if len(given) == other else ""
            raise UndeError(f"{len(given)} {what} for scores of shape {shape}: expected {count}{hint}")
    made = ArrayScores(
        found,
        names,
        memory,
        ids=ids,
        query_ids=query_ids,
        method=Additive(name),
        provenance={"method": {"name": name}},
    )
    _check_finite(made)
    return made


def as_scores(scores: Any) -> Any:
    """Bare arrays as scores; scores as they are."""
    return from_arrays(scores) if isinstance(scores, (Tensor, np.ndarray)) else scores


def _numbered(count: int) -> list[str]:
    return [f"group {j}" for j in range(count)]


def _check_finite(scores: ArrayScores) -> None:
    for q in cut(slice(0, len(scores)), max(1, scores.memory // (16 * scores.shape[1] * len(scores.groups)))):
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
    with np.errstate(over="ignore"):  # infinite, then, which is looked for
        return torch.from_numpy(np.array(values, dtype=np.float32, copy=True))
