"""Settings of an index, measured: damping by the kind of task, and several checkpoints."""

from __future__ import annotations

from typing import Any

from experiments.pages.book import NONE, Book, number, shown, table
from experiments.pages.measured import BANKS
from experiments.studies import damping


def damping_table(book: Book) -> str:
    """What the damping chosen on other data sets gets on each bank, beside 0.1 and the best."""
    results = {bank: book.get(f"damping_{bank}") for bank in damping.VARIANTS}
    missing = book.missing([f"damping_{bank}" for bank, found in results.items() if found is None])
    if missing:
        return missing
    found: dict[str, Any] = {bank: result for bank, result in results.items() if result is not None}
    rows = []
    for kind, data_sets in damping.DATA_SETS.items():
        first = next(iter(data_sets.values()))[0]
        for method in (m for m in found[first] if m != "TracIn"):
            for row in damping.left_out(found, kind, method):
                values = [shown(row[key], digits=1) for key in ("usual", "got", "most")]
                chosen, best = f"{row['chosen']:g}", f"{row['best']:g}"
                name = f"{kind}: {BANKS[row['bank']].name}"
                rows.append([name, method, values[0], f"{values[1]} ({chosen})", f"{values[2]} ({best})"])
    head = ["", "method", "LDS at 0.1", "at the damping chosen on other data sets", "at the best"]
    return table(head, rows)


def checkpoints_table(book: Book) -> str:
    """LDS of one model, of five checkpoints and of an ensemble of five."""
    found = book.get("checkpoints")
    if found is None:
        return book.missing(["checkpoints"])
    rows = []
    for name, row in found.items():
        if name == "models":
            continue
        more = [_with_gain(row[key]) for key in ("checkpoints", "ensemble")]
        rows.append([name, number(100 * row["one"]["estimate"]["mean"], 1), *more])
    return table(["method, projection", "one model", "five checkpoints", "ensemble of five"], rows)


def _with_gain(cell: dict[str, Any] | None) -> str:
    """An LDS with its paired gain, the interval over queries and subsets."""
    if cell is None:
        return NONE
    gain, total = cell["difference"], cell["difference"].get("ci95_total") or cell["difference"]["ci95"]
    lds = number(100 * cell["estimate"]["mean"], 1)
    return f"{lds} ({number(100 * gain['mean'], 1, sign=True)} ± {100 * total:.1f})"
