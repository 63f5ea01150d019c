"""What smaller stores cost, over all banks and one by one."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.pages.bank_results import BANKS
from experiments.pages.book import NONE, Book, half_width, number, table
from experiments.pages.verdicts import count

USUAL = "float32"


def _names(found: dict[str, dict[str, Any]]) -> list[str]:
    """The larger ones first."""
    names = dict.fromkeys(store for result in found.values() for store in result["stores"])
    return sorted(names, key=lambda store: fmean(_smaller(found, store)))


def _cells(found: dict[str, dict[str, Any]], store: str) -> dict[str, list[dict[str, Any]]]:
    """{bank: what was found for its methods}"""
    rows = {bank: result["stores"].get(store, {"methods": {}})["methods"] for bank, result in found.items()}
    return {bank: [*of.values()] for bank, of in rows.items() if of}


def _pooled(cells: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Cells, difference of LDS with its interval, the worst one, error of scores, the ten best that stay, Recall."""
    measured = {bank: [r for r in rows if "refused" not in r] for bank, rows in cells.items()}
    measured = {bank: rows for bank, rows in measured.items() if rows}
    every = [row for rows in measured.values() for row in rows]
    if not every:
        return [NONE] * 6
    c = count({bank: [r["difference"] for r in rows] for bank, rows in measured.items()})
    worst = min(r["difference"]["mean"] for r in every)
    refused = sum(len(rows) for rows in cells.values()) - len(every)
    known = [r["recall"] for r in every if "recall" in r]
    return [
        f"{len(every)} in {len(measured)} banks",
        c.mean + (f" ({refused} of {refused + len(every)} refused)" if refused else ""),
        number(100 * worst, sign=True),
        f"{100 * fmean(r['error'] for r in every):.2g} %",
        f"{100 * fmean(r['shared'] for r in every):.1f} %",
        number(100 * fmean(known), 1) if known else NONE,
    ]


def _smaller(found: dict[str, dict[str, Any]], store: str) -> list[float]:
    """How many times, for each bank where it was measured."""
    stores = [r["stores"] for r in found.values() if store in r["stores"]]
    return [of[USUAL]["bytes"] / of[store]["bytes"] for of in stores]


def storage_table(book: Book) -> str:
    found = book.results("storage", BANKS)
    if not found:
        return book.missing([f"storage_{bank}" for bank in BANKS])
    rows = []
    for store in _names(found):
        times = _smaller(found, store)
        size = f"{fmean(times):.1f} ({min(times):.1f} to {max(times):.1f})"
        rows.append([f"`{store}`", size if store != USUAL else "1", *_pooled(_cells(found, store))])
    head = (
        "| times smaller | cells | difference of LDS, points | worst cell | error of scores | "
        "ten best shared | Recall@10, %"
    )
    return table(head, rows)


def cells_table(book: Book) -> str:
    """Cell by cell, the difference of LDS and in brackets the error of scores."""
    found = book.results("storage", BANKS)
    names = [store for store in _names(found) if store != USUAL]
    cells = []
    for bank, result in found.items():
        stores = {s: r["methods"] for s, r in result["stores"].items()}
        for method in stores[USUAL]:
            cells.append(
                [f"{BANKS[bank].name}, {method}", *(_shown(stores.get(s, {}).get(method)) for s in names)]
            )
    return table(["", *(f"`{s}`" for s in names)], cells)


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return NONE
    if "refused" in row:
        return "refused"
    d = row["difference"]
    return f"{number(100 * d['mean'], sign=True)} ± {100 * half_width(d):.2f} [{100 * row['error']:.2g} %]"


PARTS = {"storage": storage_table, "storage_cells": cells_table}
