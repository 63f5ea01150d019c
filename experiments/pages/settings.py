"""Settings of an index, measured: damping by the kind of task, and several checkpoints."""

from __future__ import annotations

from typing import Any

from experiments.pages.bank_results import BANKS
from experiments.pages.book import NONE, Book, Section, made_by, number, paragraphs, shown, table
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


def damping_section(book: Book) -> str:
    words = (
        "Unweighted LDS in % under `kron(16)`: at a relative damping of 0.1, at the one of 0.001 to 100 with the "
        "highest mean LDS on the other data sets of the same kind of task, and at the best (in brackets the "
        'damping). What was chosen on other data is what a default can do; so `damping="auto"` is 100 for '
        "diffusion models and 0.1 for all others. Intervals are over queries, 95 %."
    )
    return paragraphs(words, damping_table(book), made_by("damping"))


def checkpoints_section(book: Book) -> str:
    words = (
        "The network and the training of [banks](banks.md) on 300 digits, 100 others as queries, 128 halves with three "
        "seeds each. Features under the final weights, under five checkpoints of the same training, and under the "
        "final weights of five trainings; all dampings are 0.1, the Fisher matrix is the empirical one. In brackets "
        "the gain, with its 95 % interval over queries and halves."
    )
    return paragraphs(words, checkpoints_table(book), made_by("checkpoints"))


SECTIONS = [
    Section("Damping by the kind of task", "", ("damping",), damping_section),
    Section("Checkpoints and ensembles", "", ("checkpoints",), checkpoints_section),
]
