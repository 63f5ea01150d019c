"""Weights without labels: the study `label_free`, over all reliable banks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.pages.bank_results import BANKS
from experiments.pages.book import Book, number, shown, table
from experiments.studies import label_free as study

RULES = {
    "A": "Algorithm 1",
    "T": "hubs divided out",
    "S": "self-retrieval",
    "J": "both objectives",
    "A on copies": "Algorithm 1 on copies",
    "T on copies": "hubs divided out, on copies",
}


def _found(book: Book) -> dict[str, Mapping[str, Any]]:
    results = {variant: book.get(f"label_free_{variant}") for variant in study.VARIANTS}
    return {variant: r for variant, r in results.items() if r is not None}


def label_free(book: Book) -> str:
    """A row for each cell: LDS without weights, and what each rule adds."""
    rows = [
        [
            _name(r["bank"]),
            f"`{r['features']}`",
            name,
            shown(m["unweighted"]),
            *(shown(m["rules"][rule]["difference"], sign=True) for rule in RULES),
        ]
        for r in _found(book).values()
        for name, m in r["methods"].items()
    ]
    head = ["bank", "features", "method", "unweighted", *RULES.values()]
    return table(head, rows) if rows else _missing(book)


def label_free_verdicts(book: Book) -> str:
    """How often each rule is better and worse, and on average."""
    rows = []
    for rule, words in RULES.items():
        cells = [m["rules"][rule]["difference"] for r in _found(book).values() for m in r["methods"].values()]
        if cells:
            signs, means = [study.verdict(d) for d in cells], [100 * d["mean"] for d in cells]
            rows.append(
                [words, str(len(cells)), str(signs.count(1)), str(signs.count(-1)),
                 f"{number(sum(means) / len(means), 1, sign=True)}", number(min(means), 1, sign=True)]
            )  # fmt: skip
    return table(["rule", "cells", "better", "worse", "mean", "least"], rows) if rows else ""


def label_free_choice(book: Book) -> str:
    """The rule that the other data sets choose, and what it does on the one that was left out."""
    found = _found(book)
    kinds = sorted({study.data_set(r["bank"]) for r in found.values()})
    if len(kinds) < 2:
        return ""
    rows = []
    for words, rules in (("with queries", study.WITH_QUERIES), ("without queries", study.WITHOUT)):
        for kind in kinds:
            rule = study.choose(found, rules, kind)
            cells = [
                m["rules"][rule]["difference"]
                for r in found.values()
                if study.data_set(r["bank"]) == kind
                for m in r["methods"].values()
            ]
            signs = [study.verdict(d) for d in cells]
            mean = sum(100 * d["mean"] for d in cells) / len(cells)
            rows.append(
                [words, kind, RULES[rule], str(len(cells)), str(signs.count(1)), str(signs.count(-1)),
                 number(mean, 1, sign=True)]
            )  # fmt: skip
        rows.append([words, "none", RULES[study.choose(found, rules)], "", "", "", ""])
    return table(["", "left out", "rule of the others", "cells", "better", "worse", "mean"], rows)


def label_free_effects(book: Book) -> str:
    """What could tell in advance: properties of the unweighted scores, beside what Algorithm 1 adds."""
    rows = [
        [
            _name(r["bank"]), f"`{r['features']}`", name,
            number(m["effect"]["groups"], 1), number(m["effect"]["examples"], 0),
            number(m["effect"]["cancellation"], 2), number(100 * m["found"], 0),
            *(shown(m["rules"][rule]["difference"], sign=True) for rule in ("A", "S")),
        ]
        for r in _found(book).values()
        for name, m in r["methods"].items()
    ]  # fmt: skip
    head = [
        "bank", "features", "method", "groups that count", "examples that carry the scores", "cancellation",
        "copies that find their original, %", "Algorithm 1", "self-retrieval",
    ]  # fmt: skip
    return table(head, rows) if rows else ""


def _name(bank: str) -> str:
    return BANKS[bank].name if bank in BANKS else bank


def _missing(book: Book) -> str:
    return book.missing([f"label_free_{variant}" for variant in study.VARIANTS])


PARTS = {
    "label_free": label_free,
    "label_free_verdicts": label_free_verdicts,
    "label_free_choice": label_free_choice,
    "label_free_effects": label_free_effects,
}
