"""What learning weights takes in memory, from sizes alone: as the default solver allocates."""

from __future__ import annotations

import torch

from unde.build.kernels import block_bytes, reading
from unde.build.training import in_memory, packed, run_bytes
from unde.groups import Groups
from unde.scores import budget
from unde.scores import needs as scoring
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
    together = queries if kept else min(queries, contributions.together(gram, count, spare))
    rows = min(m.examples, m.settled.shard_size, budget.rows_at_once(together, count, spare))
    products = 8 * count**2 * (queries if gram * queries <= spare // 4 else together)
    part = 4 * together * rows * count  # of one block; the next is read while it is there
    beside = reading(m, precision) + (part if len(m.shards) > 1 else 0)
    read, blocks = max(beside, 2 * part), in_memory(m, memory)
    if packed(m, memory):  # a shard, and the next while contributions of the last are there
        shard = m.terms * reading(m, precision)
        blocks = shard
        run = run_bytes(m, rows, together * count) if kept else run_bytes(m, m.settled.shard_size, 1)
        read = max(part + shard * (len(m.shards) > 1), 2 * part + run)
    # Kept, they are read once, and products of groups are then made of one query after the other.
    made = queries * each + max(read, 2 * each + products) if kept else read + products + 8 * rows * count
    found = {
        "query features": features + scoring.pieces(m, groups, mixes, together),
        "K": held,
        "blocks of features": blocks,
        "contributions": made,
    }
    return {name: size for name, size in found.items() if size}
