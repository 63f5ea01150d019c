"""What is not in the paper: cheaper ground truth."""

from __future__ import annotations

from experiments.pages.bank_results import BANKS
from experiments.pages.book import Book, number, table


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
    "local_retraining": local_retraining,
    "missing": lambda book, study: book.missing([f"{study}_{bank}" for bank in BANKS]),
}
