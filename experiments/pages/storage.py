"""What smaller stores cost, over all banks and one by one."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.pages.bank_results import BANKS
from experiments.pages.book import NONE, Book, Section, made_by, number, paragraphs, table
from experiments.pages.verdicts import count

USUAL = "float32"


def _found(book: Book) -> dict[str, dict[str, Any]]:
    each = {bank: book.get(f"storage_{bank}") for bank in BANKS}
    return {bank: result for bank, result in each.items() if result is not None}


def _names(found: dict[str, dict[str, Any]]) -> list[str]:
    """The larger ones first."""
    names = dict.fromkeys(store for result in found.values() for store in result["stores"])
    return sorted(names, key=lambda store: fmean(_smaller(found, store)))


def _cells(found: dict[str, dict[str, Any]], store: str, form: str = "") -> dict[str, list[dict[str, Any]]]:
    """{bank: what was found for its methods}: as they are, or with kernels from singular vectors."""
    out = {}
    for bank, result in found.items():
        rows = result["stores"].get(store, {"methods": {}})["methods"].items()
        out[bank] = [row for name, row in rows if _form(name) == form]
    return {bank: rows for bank, rows in out.items() if rows}


def _form(name: str) -> str:
    """
    >>> _form("TRAK svd(256)"), _form("TRAK")
    ('svd(256)', '')
    """
    return name.partition(" ")[2]


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
        f"{number(100 * c.pooled, sign=True)} ± {100 * c.ci95:.2f}"
        + (f" ({refused} of {refused + len(every)} refused)" if refused else ""),
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
    """All stores, over all banks and methods."""
    found = _found(book)
    if not found:
        return book.missing([f"storage_{bank}" for bank in BANKS])
    rows = []
    for store in _names(found):
        times = _smaller(found, store)
        size = f"{fmean(times):.1f} ({min(times):.1f} to {max(times):.1f})"
        rows.append([f"`{store}`", size if store != USUAL else "1", *_pooled(_cells(found, store))])
    head = [
        "",
        "times smaller",
        "cells",
        "difference of LDS, points",
        "worst cell",
        "error of scores",
        "ten best shared",
        "Recall@10, %",
    ]
    return table(head, rows)


def kernel_table(book: Book) -> str:
    """TRAK and its kin with kernels from singular vectors."""
    found = _found(book)
    if not found:
        return book.missing([f"storage_{bank}" for bank in BANKS])
    rows = []
    for store in _names(found):
        forms = sorted(
            {
                _form(name)
                for result in found.values()
                for name in result["stores"].get(store, {"methods": {}})["methods"]
                if _form(name)
            },
            key=lambda form: (len(form), form),
        )
        rows += [[f"`{store}`", f"`{form}`", *_pooled(_cells(found, store, form))[:4]] for form in forms]
    head = ["features in", "kernel", "cells", "difference of LDS, points", "worst cell", "error of scores"]
    return table(head, rows)


def storage(book: Book) -> str:
    found = _found(book)
    asked = [f"storage_{bank}" for bank in BANKS]
    if not found:
        return book.missing(asked)
    names = [store for store in _names(found) if store != USUAL]
    cells = []
    for bank, result in found.items():
        stores = {s: r["methods"] for s, r in result["stores"].items()}
        for method in (name for name in stores[USUAL] if not _form(name)):
            cells.append(
                [f"{BANKS[bank].name}, {method}", *(_shown(stores.get(s, {}).get(method)) for s in names)]
            )
    words = (
        "Features of every bank, repacked from float32. Differences of LDS to float32 are paired by query, in points, "
        "with the 95 % interval over queries and subsets; pooled over all methods of all banks, methods of a bank "
        "being taken as one. The error is relative to the norm of a query's scores (median over queries, mean over "
        "cells). Recall@10 is over banks whose contributors are known. *matrices*: biases and norms are left out, as "
        "`exclude=` does; sizes and differences are to float32 with all of it."
    )
    kernels = (
        'TRAK and its kin with a kernel from t singular vectors of the features, `form="svd(t)"`, in place of an '
        "inverse of D × D or N × N; against float32 and the exact kernel:"
    )
    head = ["", *(f"`{s}`" for s in names)]
    return paragraphs(
        words,
        storage_table(book),
        kernels,
        kernel_table(book),
        "Cell by cell, the difference of LDS and in brackets the error of scores:",
        table(head, cells),
        book.missing(asked),
        made_by("storage"),
    )


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return NONE
    if "refused" in row:
        return "refused"
    d = row["difference"]
    half = d["ci95"] if d["ci95_total"] is None else d["ci95_total"]
    return f"{number(100 * d['mean'], sign=True)} ± {100 * half:.2f} [{100 * row['error']:.2g} %]"


SECTIONS = [Section("Smaller stores", "", ("storage",), storage)]
