"""Work done block by block: blocks within a memory budget, a running top-k, and a running check of float32 range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.devices import CPU, put
from unde.errors import UndeError
from unde.scoring.top import Top

SCORE_SHARE = 16  # scores of a block take at most 1/16 of the budget; top-k makes a few more of them
STREAM_SHARE = 8  # contributions of a block, which are in memory up to three times
QUERY_SHARE = 2  # weighted features of queries: each block of queries reads all training features
DEVICE_SHARE = (
    4  # blocks on a device take at most 1/4 of its budget, and all of the above half as much as on the CPU
)
ALIGN = 16  # rows: matrix products are slow for other numbers of rows
CACHE = 2**23  # bytes of a block that is still in the processor's cache when it is used

TINY = torch.finfo(torch.float32).tiny
HUGE = 1e38  # sums whose bound is below this are finite
_ORDINARY = 2.0**-50  # a norm beyond this has a score far above TINY
_WAY_OUT = "the loss by a constant and build again"


# --- memory ----------------------------------------------------------------------------------------------


def cut(rows: slice, step: int) -> Iterator[slice]:
    """Slices of at most `step` rows.

    >>> list(cut(slice(0, 5), 3))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return (slice(a, min(a + step, rows.stop)) for a in range(rows.start, rows.stop, step))


def queries_per_block(query_bytes: int, preconditioned: bool, memory: int) -> int:
    """Number of queries whose weighted features are in memory; preconditioned ones are there three times."""
    return max(1, memory // (QUERY_SHARE * query_bytes * (3 if preconditioned else 1)))


def scores_per_block(rows: int, memory: int) -> int:
    """Number of queries whose scores with `rows` training examples are computed together."""
    return max(1, memory // (4 * SCORE_SHARE * rows))


def rows_per_block(queries: int, groups: int, memory: int) -> int:
    """Number of training examples whose contributions to queries are computed together."""
    rows = max(1, min(CACHE, memory // STREAM_SHARE) // (4 * max(1, queries) * groups))
    return rows // ALIGN * ALIGN or rows


def spare(whole: int, block: int, queries: int, memory: int) -> int:
    """Bytes left beside the features of queries and two blocks of training features; at least a quarter."""
    return max(memory // 4, memory - queries - min(whole, 2 * block))


# --- top-k -----------------------------------------------------------------------------------------------


class TopK:
    """The k best of scores that come in blocks of training examples, in order."""

    def __init__(self, queries: int, k: int, largest: bool, device: torch.device = CPU) -> None:
        self.k, self.largest = k, largest
        self.worst = -torch.inf if largest else torch.inf
        self.values = torch.empty(queries, k, device=device)  # (Q, k)
        self.indices = torch.empty(queries, k, dtype=torch.long, device=device)
        self._count = torch.zeros(queries, dtype=torch.long)  # scores seen so far

    def update(self, queries: slice, start: int, scores: Tensor) -> None:
        """Add scores (q, n) of the training examples from `start` on."""
        if int(self._count[queries.start]) < self.k or scores.device != CPU:
            best, at = stable_top(scores, min(self.k, scores.shape[1]), self.largest)
        else:
            best, at = self._better(queries, scores)
        self.merge(queries, scores.shape[1], best, at + start)

    def _better(self, queries: slice, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores that are better than the last of the k best, (q, m) and their columns; few, once k were seen."""
        last = self.values[queries, -1:]
        q, n = ((scores > last) if self.largest else (scores < last)).nonzero(as_tuple=True)
        count = torch.bincount(q, minlength=len(scores))
        place = torch.arange(len(q)) - (count.cumsum(0) - count)[q]  # those of a query one after the other
        shape = (len(scores), int(count.max()))
        values, columns = torch.full(shape, self.worst), torch.zeros(shape, dtype=torch.long)
        values[q, place], columns[q, place] = scores[q, n], n
        return values, columns

    def merge(self, queries: slice, count: int, values: Tensor, indices: Tensor) -> None:
        """Add the best of `count` training examples that follow those seen so far."""
        self._count[queries] += count
        if not values.shape[1]:
            return
        seen = int(self._count[queries.start]) - count
        before, after = min(self.k, seen), min(self.k, seen + count)
        best = torch.cat([self.values[queries, :before], values], 1)
        number = torch.cat([self.indices[queries, :before], indices], 1)
        self.values[queries, :after], at = stable_top(best, after, self.largest)
        self.indices[queries, :after] = number.gather(1, at)

    def top(self, ids: Sequence[Any] | None) -> Top:
        """The result, with the users' ids if there are any."""
        values, indices = self.values.cpu(), self.indices.cpu()
        rows = indices.tolist()
        return Top(indices, values, rows if ids is None else [[ids[i] for i in row] for row in rows])


def stable_top(values: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """As topk, but among equal values the earlier ones first.

    >>> stable_top(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), 2, largest=True)[1]
    tensor([[1, 2]])
    """
    if values.device != CPU:
        return _ordered_top(values, k, largest)
    best, at = values.topk(k, largest=largest)
    last = best[:, -1:]
    equal = (best[:, 1:] == best[:, :-1]).any(1)
    equal |= ((values >= last) if largest else (values <= last)).sum(1) > k
    tied = equal.nonzero()[:, 0]  # rows where topk chose among equals, or put them in some order
    if len(tied):
        ordered = values[tied].sort(stable=True, dim=1, descending=largest)
        best[tied], at[tied] = ordered.values[:, :k], ordered.indices[:, :k]
    return best, at


def _ordered_top(values: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The same without a wait: each value and its place make one integer, so that none are equal.

    >>> _ordered_top(torch.tensor([[-0.0, 2.0, 0.0, -1.0, 2.0]]), 4, largest=True)
    (tensor([[2., 2., -0., 0.]]), tensor([[1, 4, 0, 2]]))
    """
    bits, last = (values + 0.0).view(torch.int32), values.shape[1] - 1  # -0.0 + 0.0 is 0.0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    order = (order if largest else order.neg_()) << 32
    order |= torch.arange(last, -1, -1, device=values.device)
    at = last - (order.topk(k, dim=1).values & 0xFFFFFFFF)
    return values.gather(1, at), at


def check_k(k: int, usable: int, skipped: int = 0, noun: str = "training examples") -> None:
    """Raise unless 1 ≤ k ≤ usable."""
    if not isinstance(k, Integral):
        raise UndeError(f"top({k!r}): expected a whole number, such as top(10)")
    if not 1 <= k <= usable:
        more = f" ({skipped} more were skipped)" if skipped else ""
        raise UndeError(f"top({k}) of {usable} {noun}{more}: expected 1 ≤ k ≤ {usable}")


# --- range of float32 --------------------------------------------------------------------------------------


class ScoreRange:
    """The largest magnitude among the scores of each query, of blocks that come one after the other."""

    def __init__(self, queries: int, device: torch.device = CPU) -> None:
        self.largest = torch.zeros(queries, device=device)

    def update(self, queries: slice, scores: Tensor) -> Tensor:
        """Return the scores (q, …) unchanged; raise if one is not finite, on a device in `check` only."""
        if scores.numel():
            axes, here = tuple(range(1, scores.ndim)), scores.device == CPU
            if here:
                largest = torch.linalg.vector_norm(scores, dim=-1)  # one pass, and enough for ordinary scores
                largest = largest if largest.ndim == 1 else torch.linalg.vector_norm(largest, dim=axes[:-1])
            if not here or not (largest.min() > _ORDINARY and largest.max() < math.inf):
                largest = torch.maximum(scores.amax(axes), -scores.amin(axes))  # NaN if one is
            self.largest[queries] = torch.maximum(self.largest[queries], largest)
            if here:
                self.check(queries)
        return scores

    def check(self, queries: slice = slice(None)) -> None:
        """Raise if a score was not finite."""
        largest = self.largest[queries]
        if len(largest) and not largest.max() < math.inf:
            query = (queries.start or 0) + int((~largest.isfinite()).nonzero()[0])
            raise UndeError(f"scores of query {query} are beyond the range of float32: divide {_WAY_OUT}")

    @property
    def ordinary(self) -> bool:
        """Whether every query has a score that is far from underflow."""
        return bool((self.largest > _ORDINARY).all())

    def underflows(self) -> Tensor:
        """Queries all of whose scores are zero, or too small to have all digits."""
        return (self.largest < TINY).nonzero()[:, 0].cpu()


def check_underflow(suspects: Tensor, queries: Tensor, blocks: Iterable[Sequence[Tensor]]) -> None:
    """Raise if the scores of suspects, with features (C, ·, D), and blocks, (n, D) each, are zero by underflow only."""
    some = queries.any(2).any(0)  # no gradient, no score
    exact, suspects = [put(q[some], q.device, torch.float64) for q in queries], suspects[some.cpu()]
    for block in blocks if len(suspects) else ():
        scores = sum(q @ put(b, b.device, torch.float64).T for q, b in zip(exact, block))
        assert isinstance(scores, Tensor)
        small = scores.any(1).nonzero()[:, 0]
        if len(small):
            raise underflow(f"scores of query {int(suspects[small[0]])}")


def underflow(what: str) -> UndeError:
    return UndeError(f"{what} are below the range of float32: multiply {_WAY_OUT}")


def check_finite(scores: Tensor, what: str) -> Tensor:
    """Return the scores unchanged; raise if one is not finite."""
    if scores.numel() and not torch.stack(torch.aminmax(scores)).isfinite().all():
        raise UndeError(f"{what} are beyond the range of float32: divide {_WAY_OUT}")
    return scores


def in_range(etas: Sequence[float], reach: Sequence[float], blocks: Sequence[Tensor]) -> bool:
    """Whether norms bound all products below the largest float32, so that none has to be read again."""
    return sum(abs(eta) * r * float(block.norm()) for eta, r, block in zip(etas, reach, blocks)) < HUGE


def empty(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Uninitialized numbers; NumPy requests huge pages, which makes filling large results several times faster."""
    return (
        torch.from_numpy(np.empty(shape, np.float32)) if device == CPU else torch.empty(shape, device=device)
    )
