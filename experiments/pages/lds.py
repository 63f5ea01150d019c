"""LDS: the count over all cells, and the paper's tables 1, 2 and 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import paper_numbers as paper
from experiments.pages import figures
from experiments.pages.bank_results import BANKS, CHIEF, RULES, differences, of_bank
from experiments.pages.book import (
    NONE,
    Book,
    Section,
    command,
    folded,
    made_by,
    number,
    paragraphs,
    printed,
    shown,
    table,
)
from experiments.pages.verdicts import count, verdicts

MARK = {"better": " ▲", "worse": " ▼", "same": ""}
LEGEND = (
    "LDS in %. First interval: 95 % over queries, as in the paper. In brackets: over queries and retrained models, the "
    "one to believe. Differences are paired. ▲ better, ▼ worse: significant after Holm's correction over all cells of "
    "the rule."
)


# --- the count -------------------------------------------------------------------------------------------


def summary_table(book: Book) -> str:
    rows = []
    for rule, words in RULES.items():
        found = differences(book, rule)
        if not found:
            if rule in CHIEF:
                rows.append([words, "0", *[NONE] * 5])
            continue
        c = count({bank: list(cells.values()) for bank, cells in found.items()})
        pooled = f"{number(100 * c.pooled, sign=True)} ± {100 * c.ci95:.2f}"
        rows.append([words, *map(str, (c.cells, c.better, c.same, c.worse, c.worse_alone)), pooled])
    head = [
        "weights learned by",
        "cells",
        "better",
        "no difference",
        "worse",
        "worse, uncorrected",
        "mean difference",
    ]
    return table(head, rows)


def summary(book: Book) -> str:
    words = (
        "A cell is a bank of retrained models and a method. Weights are *better* in a cell if the paired difference of "
        "LDS to the unweighted method stands out of the noise of queries and of retrained models, and *worse* if it "
        "falls below zero by more than the noise of queries alone; both with Holm's correction over the cells of a "
        "row. The last column is the mean over cells, in points of LDS, with a 95 % interval in which the errors of "
        "methods on one bank count as one. The paper's objective is taken as it stands, with k = 3 and a decay of 0.1 "
        "(1 for DAS), on queries that serve nothing else; the paper searches both for each task. *Judged*, it is "
        "`learn_weights(scores)` with its defaults: several k and decays, of which self-retrieval confirms one or "
        "none. Self-retrieval alone is `index.learn_weights()`."
    )
    unmeasured = [b for b in BANKS if book.get(f"lds_{b}") is None]
    names = ", ".join(f"`{b}`" for b in unmeasured)
    waiting = (
        f"Not measured with the present version: {names} (`python -m experiments run lds`)." if names else ""
    )
    return paragraphs(words, summary_table(book), forest(book), waiting)


def forest(book: Book) -> str:
    """Paired differences of all cells, by bank."""
    rules = [rule for rule in (*CHIEF, "top-k") if differences(book, rule)]
    found = {rule: differences(book, rule) for rule in rules}
    rows: list[tuple[str, dict[str, tuple[float, float]]]] = []
    for bank, setting in BANKS.items():
        methods = dict.fromkeys(m for rule in rules for m in found[rule].get(bank, {}))
        if methods:
            rows.append((setting.name, {}))
        for method in methods:
            cells = {rule: found[rule][bank][method] for rule in rules if method in found[rule].get(bank, {})}
            rows.append((method, {RULES[rule]: _interval(d) for rule, d in cells.items()}))
    if not rows:
        return ""
    title = (
        "Paired difference of LDS, weighted − unweighted, 95 % intervals over queries and retrained models"
    )
    svg = figures.intervals(rows, title=title, unit="points of LDS", series=[RULES[r] for r in rules])
    return book.figure("lds-differences", svg, title)


def _interval(d: Mapping[str, Any]) -> tuple[float, float]:
    half = d["ci95"] if d.get("ci95_total") is None else d["ci95_total"]
    return 100 * d["mean"], 100 * half


# --- tables ----------------------------------------------------------------------------------------------


def marks(book: Book, rule: str) -> dict[tuple[str, str], str]:
    """▲ and ▼ of every cell of a rule; the correction is over all banks, whatever a table shows."""
    cells = {(b, m): d for b, found in differences(book, rule).items() for m, d in found.items()}
    return {cell: MARK[v] for cell, v in zip(cells, verdicts(list(cells.values())))}


def lds_table(book: Book, banks: Sequence[str], printed_in: Mapping[str, paper.WithAndWithout]) -> str:
    """Method by method: the paper's rows, then ours."""
    chief = {rule: marks(book, rule) for rule in CHIEF}
    found = {bank: of_bank(book, bank) for bank in banks}
    methods = dict.fromkeys(
        [m for rows in printed_in.values() for m in rows]
        + [m for there in found.values() if there for m in there["methods"]]
    )
    rows: list[list[str]] = []
    for method in methods:
        first = len(rows)
        for where, numbers in printed_in.items():
            if method in numbers:
                plain, weighted = numbers[method]
                gain = number(weighted[0] - plain[0], sign=True)
                rows.append(["", f"paper: {where}", printed(plain), printed(weighted), gain, "", ""])
        for bank, there in found.items():
            row = (there or {"methods": {}})["methods"].get(method)
            name = BANKS[bank].name
            if row is None:
                rows.append(["", name, f"not measured: `{command(f'lds_{bank}')}`", "", "", "", ""])
                continue
            cells = ["", name, shown(row["unweighted"])]
            for rule in CHIEF:
                got = row["rules"].get(rule)
                if got is None:
                    cells += [NONE, NONE]
                    continue
                gain = shown(got["difference"], sign=True) + chief[rule].get((bank, method), "")
                cells += [shown(got["estimate"]), gain]
            rows.append(cells)
        rows[first][0] = f"**{method}**"
    for bank, there in found.items():
        for title, estimate in (there or {"baselines": {}})["baselines"].items():
            rows.append([f"**{title}**", BANKS[bank].name, shown(estimate), "", "", "", ""])
    head = ["", "data", "w/o w", "w, paper's objective", "difference", "w, self-retrieval", "difference"]
    return table(head, rows)


def rules_table(book: Book, banks: Sequence[str]) -> str:
    """Paired differences under every rule that was measured."""
    found = {bank: of_bank(book, bank) for bank in banks}
    rules = [
        rule
        for rule in RULES
        if any(rule in row["rules"] for t in found.values() if t for row in t["methods"].values())
    ]
    if len(rules) < 2 or set(rules) <= set(CHIEF):  # the chief table has it all
        return ""
    rows, notes = [], []
    for bank, there in found.items():
        for method, row in (there or {"methods": {}})["methods"].items():
            cells = {rule: row["rules"].get(rule) for rule in rules}
            rows.append(
                [f"{BANKS[bank].name}, {method}"]
                + [NONE if c is None else shown(c["difference"], sign=True) for c in cells.values()]
            )
            notes += [
                f"- {BANKS[bank].name}, {method}, {RULES[rule]}: {c['note']}"
                for rule, c in cells.items()
                if c and c.get("note")
            ]
    body = table(["difference to unweighted", *(RULES[rule] for rule in rules)], rows)
    return folded("All ways of learning weights", paragraphs(body, "\n".join(notes)))


def smaller(banks: Sequence[str]) -> str:
    return "\n".join(f"- {s.name}: {s.what} (paper: {s.smaller})." for s in (BANKS[b] for b in banks))


def section(banks: Sequence[str], printed_in: Mapping[str, paper.WithAndWithout], words: str = ""):
    def write(book: Book) -> str:
        return paragraphs(
            LEGEND,
            lds_table(book, banks, printed_in),
            words,
            rules_table(book, banks),
            f"What is smaller here:\n\n{smaller(banks)}",
            made_by(*(f"lds_{b}" for b in banks)),
        )

    return write


def classification(book: Book) -> str:
    parts = []
    for architecture, banks in (
        ("ResNet-18", ("cifar10-resnet", "mnist-resnet")),
        ("ViT-B/16", ("cifar10-vit", "mnist-vit")),
    ):
        numbers = {f"ImageNet, {architecture}": paper.LDS_CLASSIFICATION[architecture]}
        parts.append(f"### {architecture.split('-')[0]}\n\n{lds_table(book, banks, numbers)}")
    banks = ("cifar10-resnet", "mnist-resnet", "cifar10-vit", "mnist-vit")
    parts += [rules_table(book, banks), f"What is smaller here:\n\n{smaller(banks)}"]
    return paragraphs(LEGEND, *parts, made_by(*(f"lds_{b}" for b in banks)))


def reliability(book: Book) -> str:
    """How well two trainings on the same subset agree bounds what any attribution can reach."""
    rows = []
    for bank, setting in BANKS.items():
        found = book.get(f"reliability_{bank}")
        if found is None:
            rows.append([setting.name, f"not measured: `{command(f'reliability_{bank}')}`", "", "", ""])
            continue
        accuracy = found["accuracy"]
        rows.append(
            [
                setting.name,
                f"{found['models']} + {found['twice']}",
                f"{number(found['r'])} ± {number(found['ci95'])}",
                number(100 * found["ceiling"]),
                number(100 * accuracy if accuracy is not None else None),
            ]
        )
    words = (
        "Models that are retrained on the same subset with another seed do not agree perfectly. `r` is the rank "
        "correlation, over subsets, of how well two such models do on a query, averaged over queries, with a 95 % "
        "interval by leaving subsets out. No attribution can be expected to reach an LDS above the ceiling that "
        "follows from it, √r. Models are those that were trained once and those that were trained again."
    )
    head = ["bank", "models", "r", "ceiling of LDS, %", "accuracy of the models, %"]
    return paragraphs(words, table(head, rows), made_by("reliability"))


SECTIONS = [
    Section("LDS, image classification", "Table 1", ("lds",), classification),
    Section(
        "LDS, language models",
        "Table 2",
        ("lds",),
        section(
            ("wikitext-gpt2", "sotu-gpt2", "finetuned-gpt2"),
            {"WikiText-103, GPT-2-small": paper.LDS_LANGUAGE},
            "BM25 compares words, *similarity* the mean hidden states of the last block: neither sees a gradient.",
        ),
    ),
    Section("LDS, diffusion models", "Table 5", ("lds",), section(("cifar2", "robots"), paper.LDS_DIFFUSION)),
]
RELIABILITY = Section("Reliability of the banks", "", ("reliability",), reliability)
