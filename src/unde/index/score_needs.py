"""What scoring takes in memory, from sizes alone: as the code of `GroupScores` allocates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unde.groups import Groups
from unde.index.kernel_cache import block_bytes, reading
from unde.index.training import in_memory, kept, packed, run_bytes
from unde.methods import Method
from unde.scoring import budget
from unde.store.limbs import nbytes
from unde.store.manifest import Manifest

Mixes = Sequence[Sequence[slice]] | None


def total(
    m: Manifest,
    method: Method,
    mixes: Mixes,
    held: int,
    queries: int,
    memory: int,
    precision: torch.dtype = torch.float32,
) -> dict[str, int]:
    """All scores of the queries at once, as `total` gives them; `held` are the bytes of K."""
    features, rows = 4 * m.terms * queries * m.width, min(m.examples, m.settled.shard_size)
    weighted = min(queries, budget.queries_at_once(4 * m.terms * m.width, mixes is not None, memory))
    together = min(weighted, budget.scores_at_once(rows, memory))
    part, last = 4 * together * rows, 4 * (queries % together or together) * rows
    before = part if len(m.shards) > 1 or together < queries else 0  # while the next scores are made
    made = part if method.linear else 3 * part  # `final` makes two more of it
    one = 4 * m.terms * m.examples * m.width if kept(m, memory) else m.terms * block_bytes(m)
    streamed = in_memory(m, memory) + reading(m, precision) + (last if len(m.shards) > 1 else 0)
    limbs = 0
    if packed(m, memory) and weighted == queries:  # one shard is there while the next is read
        shard = m.terms * reading(m, precision)
        limbs, sums = nbytes(m.codec, m.columns, rows, queries, together)
        run = sums or run_bytes(m, rows)
        one, streamed = shard + run, min(2, len(m.shards)) * shard + before
    blocks = max(streamed, one + before + made)
    if method.extra_measures:
        blocks = max(blocks, _leverages(m, memory) + part + reading(m, precision))
    scaled = 4 * m.terms * weighted * m.width
    applied = 0 if mixes is None else 2 * scaled  # K of them, before and after it is put together
    found = {
        "query features, weighted too": features + scaled + m.terms * limbs,
        "scores": 4 * queries * m.examples,
        "K": held,
        "blocks of features": max(blocks, applied),
    }
    return {name: size for name, size in found.items() if size}


def _leverages(m: Manifest, memory: int) -> int:
    """Bytes of features and of blocks while leverages are taken, for methods that keep something beside features: with
    the first block in hand both sides are read once more, and multiplied."""
    whole, one = 4 * m.terms * m.examples * m.width, m.terms * block_bytes(m)
    if kept(m, memory):
        return whole + 2 * one
    return one + max(2 * min(whole, 2 * one), 3 * one)


def pieces(m: Manifest, groups: Groups, mixes: Mixes, queries: int) -> int:
    """Bytes of what of the queries is multiplied with blocks, group by group."""
    return (1 if mixes is None else passes(m, groups, mixes)) * 4 * m.terms * queries * m.width


def passes(m: Manifest, groups: Groups, mixes: Sequence[Sequence[slice]]) -> int:
    """How often K is applied to tell groups apart: as often as there are groups in one of its blocks."""
    owner = {c.start: j for c, j in zip(m.columns, groups.of(m.unit_names))}
    inside = ({owner[a] for c in block for a in owner if c.start <= a < c.stop} for block in mixes)
    return max(len(met) for met in inside)
