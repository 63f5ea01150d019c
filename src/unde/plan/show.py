"""A plan as plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unde.console import size

if TYPE_CHECKING:
    from unde.plan.plan import Plan

_PASSES = {
    "training": "training pass (forward and backward)",
    "frozen": "frozen pass (no weight gradients)",
    "features": "features",
    "directions": "directions of pca, from a sample",
    "kernel": "kernel",
}
_STAGES = {
    "training with Adam": "training step with Adam, to compare",
    "check": "check of a few examples",
    "features": "features",
    "directions": "directions of pca",
    "kernel": "kernel",
    "scoring": "scoring {queries} queries",
    "weight learning": "weight learning on {queries} queries",
}


def table(plan: Plan) -> str:
    method = plan.method
    checkpoints = f", {plan.checkpoints} checkpoints" if plan.checkpoints > 1 else ""
    ways = ", ".join(f"{count} by {way}" for way, count in plan.ways.items())
    lines = [
        f"{plan.model} in {plan.dtype}: {plan.examples:,} examples in batches of {plan.batch_size}{checkpoints}; "
        f"{method['name']}, {method['projection']}, stored in {plan.store_dtype}",
        "",
        *_columns([("groups", "parameters", "features"), *_groups(plan)]),
        f"parameter tensors: {ways}",
        "",
        *_columns([("operations", "of training", "in all"), *_operations(plan)]),
        "",
        *_columns([("on disk", "bytes"), *_disk(plan)]),
        "",
        *_columns([("peak memory", "bytes", "of which"), *_memory(plan)], left=2),
    ]
    return "\n".join([*lines, *("\nnote: " + note for note in plan.notes)])


def _groups(plan: Plan) -> list[tuple[str, ...]]:
    """Groups that differ in a number only share a row."""
    rows: dict[str, list[int]] = {}
    for name, group in plan.groups.items():
        row = rows.setdefault(re.sub(r"\d+", "*", name), [0, 0, 0])
        for i, value in enumerate((1, group.parameters, group.features)):
            row[i] += value
    shown = [(f"{n} × {name}" if n > 1 else name, f"{p:,}", f"{f:,}") for name, (n, p, f) in rows.items()]
    return [*shown, (f"all {len(plan.groups)}", f"{plan.parameters:,}", f"{plan.features:,}")]


def _operations(plan: Plan) -> list[tuple[str, ...]]:
    shares = {name: plan.ratio(name) for name in plan.flops}
    shown = {name: f"{share:.3f}" if share >= 0.001 else "< 0.001" for name, share in shares.items()}
    return [(_PASSES[name], shown[name], flops(n)) for name, n in plan.flops.items()]


def _disk(plan: Plan) -> list[tuple[str, ...]]:
    return [*((name, size(n)) for name, n in plan.disk.items()), ("all", size(plan.bytes_on_disk))]


def _memory(plan: Plan) -> list[tuple[str, ...]]:
    rows = []
    for stage, parts in plan.memory.items():
        shown = ", ".join(f"{name} {size(n)}" for name, n in parts.items() if n >= 0.01 * plan.peak(stage))
        rows.append((_STAGES[stage].format(queries=plan.queries), size(plan.peak(stage)), shown))
    return rows


def flops(count: float) -> str:
    """Operations for people.

    >>> flops(3.2e15)
    '3.2 PFLOP'
    """
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:.3g} ZFLOP"


def _columns(rows: Sequence[tuple[str, ...]], left: int | None = None) -> list[str]:
    """Aligned; all but the first column, and that with number `left`, to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = (
            cell.ljust(w) if i in (0, left) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
        )
        return "  ".join(cells).rstrip()

    return [line(rows[0]), "-" * len(line(rows[0])), *(line(row) for row in rows[1:])]
