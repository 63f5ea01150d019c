"""Scores against the training examples of an index, and their self-influence τ(i, i)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unde.devices import CPU, put, upload
from unde.errors import UndeError
from unde.groups import Groups
from unde.index.kernel_cache import KernelCache
from unde.index.reader import IndexReader
from unde.kernels import Kernel
from unde.methods import CUSTOM, Method
from unde.methods.registry import check_picklable
from unde.parallel import SERIAL, Executor
from unde.scoring.base import WeightsLike
from unde.scoring.blocks import DEVICE_SHARE, TINY, check_finite, cut, underflow
from unde.scoring.group_scores import GroupScores
from unde.scoring.train_features import TrainFeatures

HELD_SHARE = 4  # blocks stay in memory if all of them take at most 1/4 of the budget
RUN_BYTES = 2**23  # of each thread that are unpacked together: with fewer, threads wait too often
MOST_RUN_BYTES = 2**24  # of all threads: more are not in the cache any more when they are multiplied
_FEWEST, _FEWEST_BYTES = 64, 2**29  # rows: products with fewer are slow, but as many gradients are too large
_FEWEST_SHARE = 4  # they take at most 1/4 of the budget
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
        for at, q in of_checkpoint:
            both = torch.linalg.vecdot(q, t[:, at.columns].unflatten(1, (len(q), -1)).transpose(0, 1))
            parts[:, at.groups] += eta * both.T
    square = torch.diag_embed(parts.T).permute(1, 2, 0)  # (n, n, M), zero off the diagonal
    return scores.method.by_group(square, scores.final_context(everything, train)).diagonal().T


class StoredFeatures(TrainFeatures):
    """Training features of an index under a kernel.

    Where K is block-diagonal it acts on the query side, and blocks are the features as they are stored; else blocks
    are K g(n).
    """

    def __init__(
        self,
        reader: IndexReader,
        kernel: Kernel,
        executor: Executor = SERIAL,
        ids: Sequence[Any] | None = None,
    ) -> None:
        m = reader.manifest
        self.reader, self.kernel, self.executor, self.ids = reader, kernel, executor, ids
        self.units, self.columns, self.cuts = m.unit_names, m.columns, m.shards
        self.checkpoint_weights = m.checkpoint_weights
        self._caches = [KernelCache(reader, kernel, c, executor) for c in range(m.terms)]
        self.kernel_blocks = self._caches[0].bound.blocks
        if self.kernel_blocks is None and reader.codec.lossy:
            raise UndeError(
                f"{reader.folder} is stored as {m.store_dtype}, in which K g(n) cannot be: {kernel} has to act on the "
                "query side (its `blocks`), or build with another projection"
            )
        for cache in self._caches:
            cache.fitted() if self.kernel_blocks is not None else cache.make_rows()
        there, held = reader.compute, 4 * m.examples * m.width * m.terms
        small = held <= there.memory // HELD_SHARE
        self._blocks_in_memory: dict[int, list[Tensor]] | None = {} if small else None
        self.device = there.device
        if self.device != CPU:  # what is held there takes its memory
            kernels = m.terms * self._caches[0].bound.needs().memory if self.kernel_blocks is not None else 0
            left = there.memory - kernels - held * small
            self.block_memory = max(there.memory // HELD_SHARE, left)
        self._leverage: Tensor | None = None

    # --- blocks ---------------------------------------------------------------------------------------------

    def block(self, s: int) -> list[Tensor]:
        if self._blocks_in_memory is not None and s in self._blocks_in_memory and not self._changed(s):
            return self._blocks_in_memory[s]
        parts = self._unpack(self._shards(s), slice(None))
        if self._blocks_in_memory is not None:
            self._blocks_in_memory[s] = parts
        return parts

    def block_rows(self, s: int, local: Tensor) -> list[Tensor]:
        if self._blocks_in_memory is not None:
            return super().block_rows(s, local)
        return self._unpack(self._shards(s), local)

    def _unpack(self, shards: Sequence[dict[str, Tensor]], local: Tensor | slice) -> list[Tensor]:
        """Some rows of shards, where they are computed with."""
        packed = [self.reader.features_of(shard, local) for shard in shards]
        there = [{name: put(t, self.device) for name, t in part.items()} for part in packed]
        return [self.reader.codec.unpack(part, self.columns) for part in there]

    def runs(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """As `blocks`; shards that have to be unpacked come in parts that are multiplied while they are in cache.

        To write all that a shard unpacks to, and to read it again, would take longer than to read it in float32. To a
        device parts go up as they are stored, the next while the last is multiplied.
        """
        codec, here = self.reader.codec, self.device == CPU
        if self._blocks_in_memory is not None or (here and codec.mapped):
            yield from self.blocks()
            return
        width, terms = self.columns[-1].stop, len(self._caches)
        step = run_rows(width * terms, self.reader.memory) if here else self.device_rows(1 / DEVICE_SHARE)
        buffers = None if codec.mapped else torch.empty(terms, step, width, device=self.device)
        for rows, packed in upload(self._packed_runs(step), self.device):
            outs = [None] * terms if buffers is None else buffers[:, : rows.stop - rows.start]
            yield rows, [codec.unpack(part, self.columns, out) for part, out in zip(packed, outs)]

    def _packed_runs(self, step: int) -> Iterator[tuple[slice, list[dict[str, Tensor]]]]:
        """(training examples, what they are unpacked from under each checkpoint), `step` at most."""
        for s, whole in enumerate(self.cuts):
            shards = self._shards(s)
            for rows in cut(whole, step):
                local = slice(rows.start - whole.start, rows.stop - whole.start)
                yield rows, [self.reader.features_of(shard, local) for shard in shards]

    def device_rows(self, share: float) -> int:
        """Training examples that take this share of the budget: three parts as they are stored, and one unpacked."""
        codec = self.reader.codec
        packed, unpacked = codec.nbytes(1, self.columns), 0 if codec.mapped else 4 * self.columns[-1].stop
        budget = share * (self.block_memory or self.reader.memory)
        return max(1, int(budget / (len(self._caches) * (3 * packed + unpacked))))

    def sides(self, which: Tensor, step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(positions in `which`, features of those examples, what features of queries are multiplied with), both
        (C, n, D), at most `step` at a time."""
        for s, rows in enumerate(self.cuts):
            inside = ((which >= rows.start) & (which < rows.stop)).nonzero()[:, 0]
            if not len(inside):
                continue
            held = None if self._blocks_in_memory is None else self.block(s)
            shards = self._shards(s) if held is None else []
            apart = self.kernel_blocks is None  # what is multiplied with is K g(n)
            sources = [self.reader.packed(c, s) for c in range(len(self._caches))] if apart else []
            for at in inside.split(step):
                local = which[at] - rows.start
                if held is None:
                    facing = torch.stack(self._unpack(shards, local))
                else:
                    facing = torch.stack([block.index_select(0, put(local, self.device)) for block in held])
                yield at, torch.stack(self._unpack(sources, local)) if apart else facing, facing

    def _changed(self, s: int) -> bool:
        """Whether a file that a block in memory is mapped from has changed."""
        if not self.reader.codec.mapped:
            return False
        if self.kernel_blocks is None:
            return any(cache.watch.changed(cache.path(s)) for cache in self._caches)
        m, reader = self.reader.manifest, self.reader
        return any(reader.watch.changed(m.shard(reader.folder, c, s)) for c in range(m.terms))

    def _shards(self, s: int) -> list[dict[str, Tensor]]:
        """Shard s as it is stored, under each checkpoint."""
        if self.kernel_blocks is None:
            return [cache.packed(s) for cache in self._caches]
        return [self.reader.packed(c, s) for c in range(len(self._caches))]

    # --- kernel and norms -------------------------------------------------------------------------------------

    def apply_kernel(self, checkpoint: int, queries: Tensor) -> Tensor:
        return queries if self.kernel_blocks is None else self.kernel_times(checkpoint, queries)

    def kernel_times(self, checkpoint: int, rows: Tensor) -> Tensor:
        """K applied to features (n, D), wherever it acts."""
        return self._caches[checkpoint].fitted().apply(rows)

    def squared_norms(self) -> Tensor:
        return self.reader.squares

    def skipped(self) -> Tensor:
        return self.reader.skipped

    def extra_values(self) -> Tensor:
        return self.reader.values("beside")

    def find(self, digests: Sequence[str]) -> list[int]:
        return self.reader.find_digests(digests)

    def leverage(self) -> Tensor:
        if self._leverage is None:
            step = self.examples if self.device == CPU else self.device_rows(1 / DEVICE_SHARE)
            parts = []
            for _, sides, facing in self.sides(torch.arange(self.examples), step):
                pairs = enumerate(zip(self.reader.manifest.checkpoint_weights, sides, facing))
                of_checkpoints = [
                    eta * torch.linalg.vecdot(self.apply_kernel(c, f), t) for c, (eta, f, t) in pairs
                ]
                parts.append(torch.stack(of_checkpoints).sum(0))
            self._leverage = torch.cat(parts).cpu()
        return self._leverage


def run_rows(width: int, memory: int) -> int:
    """Rows that are unpacked together: by the number of threads, unless they are large beside the memory budget.

    >>> run_rows(10**6, 2**31), run_rows(10**6, 2**28), run_rows(124 * 10**6, 2**31)
    (64, 16, 1)
    """
    fewest = max(1, min(_FEWEST, min(_FEWEST_BYTES, memory // _FEWEST_SHARE) // (4 * width)))
    return max(fewest, min(RUN_BYTES * torch.get_num_threads(), MOST_RUN_BYTES) // (4 * width) // 16 * 16)
