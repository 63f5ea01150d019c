"""What learning weights takes in memory, from sizes alone: as the default solver allocates."""

from __future__ import annotations

import torch

from unde.groups import Groups
from unde.index import score_needs as scoring
from unde.index.kernel_cache import block_bytes, reading
from unde.index.score_needs import in_memory, packed, run_bytes
from unde.onednn import arranged
from unde.scoring import blocks as budget
from unde.store.manifest import Manifest
from unde.weights import contributions


def learning(
    m: Manifest,
    groups: Groups,
    mixes: scoring.Mixes,
    held: int,
    queries: int,
    memory: int,
    precision: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Weights from queries, with `held` bytes of K."""
    count, each = len(groups), 4 * m.examples * len(groups)  # the contributions of one query
    features, row = 4 * m.terms * queries * m.width, 4 * m.terms * m.width
    spare = budget.spare(row * m.examples, m.terms * block_bytes(m), features, memory)
    kept = contributions.keeps(queries, m.examples, count, spare)
    gram = 16 * count**2  # of a query, in float64 and twice over
    fit, most = gram * queries <= spare // 4, contributions.together(gram, count, spare)
    squares = 8 * count**2 * (queries if fit else min(queries, most))
    sizes = (count, spare, memory, precision)
    if kept:  # they are read once, and products of groups are then made of one query after the other
        together, made = queries, queries * each + max(_reading(m, queries, *sizes), 2 * each + squares)
    else:
        # Few queries are selected for at once, and then those that are left over, of so many more training examples.
        chosen = min(queries, contributions.together(12 * m.examples, count, spare))
        spans = {min(queries, most), chosen, queries % chosen or chosen}
        together, made = max(spans), squares + max(_reading(m, q, *sizes) for q in spans)
    blocks = m.terms * reading(m, precision) if packed(m, memory) else in_memory(m, memory)
    found = {
        "query features": features + scoring.pieces(m, groups, mixes, together),
        "K": held,
        "blocks of features": blocks,
        "contributions": made,
    }
    return {name: size for name, size in found.items() if size}


def _reading(m: Manifest, queries: int, count: int, spare: int, memory: int, precision: torch.dtype) -> int:
    """Bytes beside a block of features while contributions of so many queries are read and squared."""
    rows = min(m.examples, m.settled.shard_size, budget.rows_at_once(queries, count, spare))
    part = 4 * queries * rows * count  # of one block; the next is read while it is there
    before, squared = part if len(m.shards) > 1 else 0, part + 8 * rows * count
    made = 2 * part + arranged(queries, rows, m.width)
    if not packed(m, memory):
        return max(reading(m, precision) + before, made, squared)
    shard = m.terms * reading(m, precision) if len(m.shards) > 1 else 0  # the next
    return max(shard + before, made + run_bytes(m, rows), squared)
