"""Settings of an index, measured: damping by the kind of task, several checkpoints, and calibration on halves."""

from __future__ import annotations

from typing import Any

from experiments.pages.bank_results import BANKS
from experiments.pages.book import NONE, Book, half_width, number, shown, table
from experiments.studies import damping


def damping_table(book: Book) -> str:
    """What the damping chosen on other data sets gets on each bank, beside 0.1 and the best."""
    found = book.results("damping", damping.VARIANTS)
    if len(found) < len(damping.VARIANTS):
        return book.missing([f"damping_{bank}" for bank in damping.VARIANTS])
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
    gain, lds = cell["difference"], number(100 * cell["estimate"]["mean"], 1)
    return f"{lds} ({number(100 * gain['mean'], 1, sign=True)} ± {100 * half_width(gain):.1f})"


def calibration_table(book: Book) -> str:
    """One row for each index of each bank, calibrated on 16 halves."""
    found = book.results("calibration", BANKS)
    if not found:
        return book.missing(["calibration"])
    rows = [_row(f"{BANKS[b].name}, {name}", index) for b, r in found.items() for name, index in r.items()]
    head = (
        "bank, index | TRAK, D-TRAK or DAS at damping 0.1 | best setting | chosen with 8 halves | "
        "with 16 halves | weights add (16) | expected (16) | within its interval (8, 16)"
    )
    return table(head, rows)


def _row(name: str, index: dict[str, Any]) -> list[str]:
    few, many = index["8"], index["16"]
    best = index["settings"][index["best"]]

    def chosen(draws: dict[str, Any]) -> str:
        judged = draws["judged"] - draws["gain"]
        return f"{_percent(judged)} ({_percent(draws['behind'])} behind; {100 * draws['near']:.0f} %)"

    gain = (
        f"{number(100 * many['gain'], 1, sign=True)} (least {number(100 * many['gain least'], 1, sign=True)})"
    )
    return [
        name,
        _percent(index["default"]["lds"]),
        f"{_percent(best)} ({index['best']})",
        chosen(few),
        chosen(many),
        gain,
        f"{_percent(many['expected'])} ± {_percent(many['half width'])}, got {_percent(many['judged'])}",
        f"{100 * few['covered']:.0f} %, {100 * many['covered']:.0f} %",
    ]


def _percent(value: float) -> str:
    return number(100 * value, 1)


def calibration_worse(book: Book) -> str:
    found = [index for result in book.results("calibration", BANKS).values() for index in result.values()]
    halves = [index[h] for index in found for h in ("8", "16")]
    return f"{sum(h['worse'] for h in halves)} of {sum(len(h['draws']) for h in halves)}"


PARTS = {
    "damping": damping_table,
    "checkpoints": checkpoints_table,
    "calibration": calibration_table,
    "calibration_worse": calibration_worse,
}
