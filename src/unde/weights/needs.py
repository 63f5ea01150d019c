"""What learning weights takes in memory, from sizes alone: as the default solver allocates."""

from __future__ import annotations

import torch

from unde.build.kernels import in_memory, reading
from unde.groups import Groups
from unde.scores import needs as scoring
from unde.store.manifest import Manifest


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
    kept = queries * (each + 8 * count**2) <= memory
    together = queries if kept else min(queries, max(1, memory // max(16 * count**2, 8 * count)))
    rows = min(m.examples, m.settled.shard_size, max(1, memory // (8 * together * count)))
    products = 8 * count**2 * (queries if 16 * count**2 * queries <= memory else together)
    part = 4 * together * rows * count  # of one block; the next is read while it is there
    beside = reading(m, precision) + (part if len(m.shards) > 1 else 0)
    read = max(beside, 2 * part)
    # Kept, they are read once, and products of groups are then made of one query after the other.
    contributions = (
        queries * each + max(read, 2 * each + products) if kept else read + products + 8 * rows * count
    )
    found = {
        "query features": 4 * m.terms * queries * m.width + scoring.pieces(m, groups, mixes, together),
        "K": held,
        "blocks of features": in_memory(m, memory),
        "contributions": contributions,
    }
    return {name: size for name, size in found.items() if size}
