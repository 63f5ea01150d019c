"""LDS: the count over all cells, and the paper's tables 1, 2 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from experiments import paper_numbers as paper
from experiments.pages import figures
from experiments.pages.bank_results import BANKS, CHIEF, RULES, differences, of_bank
from experiments.pages.book import NONE, Book, command, half_width, number, paragraphs, shown, table
from experiments.pages.verdicts import COUNTED, count, verdicts

MARK = {"better": " ▲", "worse": " ▼", "same": ""}
PRINTED = {  # beside the table that begins with a bank
    "cifar10-resnet": {"ImageNet, ResNet-18": paper.LDS_CLASSIFICATION["ResNet-18"]},
    "cifar10-vit": {"ImageNet, ViT-B/16": paper.LDS_CLASSIFICATION["ViT-B/16"]},
    "wikitext-gpt2": {"WikiText-103, GPT-2-small": paper.LDS_LANGUAGE},
    "cifar2": paper.LDS_DIFFUSION,
}


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
        rows.append([words, *c.row])
    return table(["weights learned by", *COUNTED], rows)


def waiting(book: Book) -> str:
    names = ", ".join(f"`{b}`" for b in BANKS if book.get(f"lds_{b}") is None)
    return (
        f"Not measured with the present version: {names} (`python -m experiments run lds`)." if names else ""
    )


def forest(book: Book) -> str:
    rules = [rule for rule in (*CHIEF, "top-k") if differences(book, rule)]
    found = {rule: differences(book, rule) for rule in rules}
    rows: list[tuple[str, dict[str, tuple[float, float]]]] = []
    for bank, setting in BANKS.items():
        methods = dict.fromkeys(m for rule in rules for m in found[rule].get(bank, {}))
        if methods:
            rows.append((setting.name, {}))
        for method in methods:
            cells = {rule: found[rule][bank][method] for rule in rules if method in found[rule].get(bank, {})}
            rows.append(
                (method, {RULES[rule]: (100 * d["mean"], 100 * half_width(d)) for rule, d in cells.items()})
            )
    if not rows:
        return ""
    title = (
        "Paired difference of LDS, weighted − unweighted, 95 % intervals over queries and retrained models"
    )
    svg = figures.intervals(rows, title=title, unit="points of LDS", series=[RULES[r] for r in rules])
    return book.figure("lds-differences", svg, title)


# --- tables ----------------------------------------------------------------------------------------------


def marks(book: Book, rule: str) -> dict[tuple[str, str], str]:
    """▲ and ▼ of every cell of a rule; the correction is over all banks, whatever a table shows."""
    cells = {(b, m): d for b, found in differences(book, rule).items() for m, d in found.items()}
    return {cell: MARK[v] for cell, v in zip(cells, verdicts(list(cells.values())))}


def beside_paper(book: Book, *banks: str) -> str:
    return lds_table(book, *banks, printed_in=PRINTED[banks[0]])


def lds_table(
    book: Book, *banks: str, printed_in: Mapping[str, paper.WithAndWithout] = MappingProxyType({})
) -> str:
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
                both = [f"{number(mean)} ± {half:.2f}" for mean, half in (plain, weighted)]
                rows.append(["", f"paper: {where}", *both, gain, "", ""])
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


def rules_table(book: Book, *banks: str) -> str:
    """Paired differences under every rule that was measured, and notes."""
    found = {bank: of_bank(book, bank) for bank in banks}
    measured = {r for t in found.values() if t for row in t["methods"].values() for r in row["rules"]}
    rules = [rule for rule in RULES if rule in measured]
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
    return paragraphs(body, "\n".join(notes))


def smaller(book: Book, *banks: str) -> str:
    return "\n".join(f"- {s.name}: {s.what} (paper: {s.smaller})." for s in (BANKS[b] for b in banks))


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
    return table(["bank", "models", "r", "ceiling of LDS, %", "accuracy of the models, %"], rows)


PARTS = {
    "summary": summary_table,
    "forest": forest,
    "waiting": waiting,
    "lds": lds_table,
    "lds_beside_paper": beside_paper,
    "rules": rules_table,
    "smaller": smaller,
    "reliability": reliability,
}
