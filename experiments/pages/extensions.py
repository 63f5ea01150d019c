"""What is not in the paper: what weights could do, and cheaper ground truth."""

from __future__ import annotations

from typing import Any

from experiments.pages.bank_results import BANKS, RULES, methods_of
from experiments.pages.book import Book, number, table
from experiments.pages.verdicts import count


def possible(book: Book) -> str:
    """Every rule beside weights that were fitted to half of the retrained models, all judged on the other half."""
    names = tuple(RULES)
    halves: dict[str, dict[str, list[dict[str, Any]]]] = {rule: {} for rule in names}
    for bank in BANKS:
        for row in methods_of(book, bank).values():
            if "half" in row["rules"].get("reference", {}):
                for rule in names:
                    halves[rule].setdefault(bank, []).append(row["rules"][rule]["half"])
    if not halves["reference"]:
        return book.missing([f"lds_{bank}" for bank in BANKS])
    rows = []
    for rule, cells in halves.items():
        c = count(cells)
        rows.append([RULES[rule], str(c.cells), c.mean])
    return table(["weights", "cells", "mean difference of LDS, points"], rows)


def local_retraining(book: Book) -> str:
    found = book.results("local_retraining", BANKS)
    if not found:
        return book.missing(["local_retraining"])
    rows = [
        [
            BANKS[b].name,
            str(len(t["settings"])),
            number(t["spearman"]),
            f"{t['seconds a model']['local'] / t['seconds a model']['full']:.2f}",
        ]
        for b, t in found.items()
    ]
    return table(["bank", "settings", "correlation", "cost"], rows)


PARTS = {
    "possible": possible,
    "local_retraining": local_retraining,
    "missing": lambda book, study: book.missing([f"{study}_{bank}" for bank in BANKS]),
}
