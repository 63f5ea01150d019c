"""How a memory budget is cut up when scores are made: what is done at once, and what in parts."""

from __future__ import annotations

PART = 16  # scores of a block take at most this fraction of the budget; top-k makes a few more of it
STREAM = 8  # contributions of a block, which are there up to three times
QUERIES = 8  # weighted features of queries
ALIGN = 16  # rows: products of other numbers of them end in slow ones
BLOCK = (
    2**23
)  # bytes that are still in the processor's cache when they are used, and memory that is used again


def queries_at_once(query_bytes: int, applied: bool, memory: int) -> int:
    """Queries whose weighted features are in memory; where K is `applied` to them, three times over."""
    return max(1, memory // (QUERIES * query_bytes * (3 if applied else 1)))


def scores_at_once(rows: int, memory: int) -> int:
    """Queries whose scores with `rows` training examples are made together."""
    return max(1, memory // (4 * PART * rows))


def rows_at_once(queries: int, groups: int, memory: int) -> int:
    """Training examples whose contributions to queries are made together."""
    rows = max(1, min(BLOCK, memory // STREAM) // (4 * max(1, queries) * groups))
    return rows // ALIGN * ALIGN or rows


def spare(whole: int, block: int, queries: int, memory: int) -> int:
    """What is left of the budget beside the features of queries and blocks of training features, of `whole` bytes in
    all: one, and the one before. At least a quarter."""
    return max(memory // 4, memory - queries - min(whole, 2 * block))
