"""Calibration on halves drawn from the banks: what it chooses, what weights add, and whether its estimate holds."""

from __future__ import annotations

from typing import Any

from experiments.pages.bank_results import BANKS
from experiments.pages.book import Book, Section, made_by, number, paragraphs, table
from experiments.studies import calibration


def calibration_table(book: Book) -> str:
    """One row for each index of each bank, calibrated on 16 halves."""
    found = {bank: book.get(f"calibration_{bank}") for bank in calibration.VARIANTS}
    missing = book.missing([f"calibration_{bank}" for bank, result in found.items() if result is None])
    if missing:
        return missing
    rows = []
    for bank, result in found.items():
        assert result is not None
        rows += [_row(f"{BANKS[bank].name}, {name}", index) for name, index in result.items()]
    head = [
        "bank, index", "TRAK, D-TRAK or DAS at damping 0.1", "best setting", "chosen with 8 halves", "with 16 halves",
        "weights add (16)", "expected (16)", "within its interval (8, 16)",
    ]  # fmt: skip
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


def calibration_section(book: Book) -> str:
    words = (
        f"Means over {calibration.DRAWS} draws of 8 and 16 halves from each bank. The halves and the learning queries "
        "choose the setting and fit the weights; the other halves and the evaluation queries judge. LDS in %. "
        "*Chosen*: the judged LDS without weights, in brackets how far behind the best setting of the same judge, and "
        "the share of draws within 1.5 points of it. *Weights add*: judged, 0 where uniform ones were kept; fewer than "
        f"12 halves fit none. They were significantly worse (over queries) in {_worse(book)} draws. *Expected*: "
        "the cross-fitted estimate with its 95 % interval, and what the judge found; the last column is the share of "
        "draws in which that lies within the interval."
    )
    return paragraphs(words, calibration_table(book), made_by("calibration"))


def _worse(book: Book) -> str:
    found = [book.get(f"calibration_{bank}") or {} for bank in calibration.VARIANTS]
    indexes = [index for result in found for index in result.values()]
    worse = sum(index[str(h)]["worse"] for index in indexes for h in calibration.HALVES)
    return f"{worse} of {len(indexes) * len(calibration.HALVES) * calibration.DRAWS}"


SECTION = Section("Calibration on a few halves", "", ("calibration",), calibration_section)
