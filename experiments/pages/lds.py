"""LDS: the count over all cells, and the paper's tables 1, 2 and 5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from experiments import paper_numbers as paper
from experiments.pages import figures
from experiments.pages.bank_results import BANKS, CHIEF, RULES, differences, methods_of, of_bank, reliable
from experiments.pages.book import NONE, Book, command, half_width, number, shown, table
from experiments.pages.verdicts import count, verdicts
from unde.evaluate.search import DAMPINGS

HEADS = {
    "best": "best on the evaluation",
    "search": "searched, cross-fitted",
    "fixed": "k = 5, λ′ = 0.5",
    "calibrated": "calibrated on 16 models",
    "fitted": "fitted to half of the models",
}
MARK = {"better": " ▲", "worse": " ▼", "same": ""}
PRINTED = {  # beside the table that begins with a bank
    "cifar10-resnet": {"ImageNet, ResNet-18": paper.LDS_CLASSIFICATION["ResNet-18"]},
    "cifar10-vit": {"ImageNet, ViT-B/16": paper.LDS_CLASSIFICATION["ViT-B/16"]},
    "wikitext-gpt2": {"WikiText-103, GPT-2-small": paper.LDS_LANGUAGE},
    "cifar2": paper.LDS_DIFFUSION,
}


# --- the count -------------------------------------------------------------------------------------------


def summary_table(book: Book) -> str:
    """Four lines: the chief rules, and what the paper seems to report; on banks that can tell, and on all."""
    rules = ("best", *CHIEF)
    return table(
        ["weights", *_two("banks that can tell"), *_two("all banks")], _counts(book, rules, reliable(book))
    )


def lead(book: Book) -> str:
    """The one sentence: what weights do on banks that can tell."""
    sure = reliable(book)
    counts = {}
    for rule in CHIEF:
        found = differences(book, rule, sure)
        if not found:
            return book.missing(f"lds_{bank}" for bank in sure or BANKS)
        counts[rule] = count({bank: list(cells.values()) for bank, cells in found.items()})
    one, fixed, calibrated = (counts[rule] for rule in CHIEF)
    everywhere = [count({b: list(c.values()) for b, c in differences(book, r).items()}) for r in CHIEF]
    return (
        f"**Where retrained models can tell, the paper's weights with its search change LDS by {one.mean} points "
        f"(better in {one.better} of {one.cells} cells, worse in {one.worse}), at one fixed point by {fixed.mean}, "
        f"and weights calibrated on 16 retrained models by {calibrated.mean}. Over all {everywhere[0].cells} cells "
        f"they are worse in {everywhere[0].worse}, {everywhere[1].worse} and {everywhere[2].worse}.**"
    )


def gains_table(book: Book) -> str:
    """What weights add by method: in the paper, and here under its search."""
    theirs: dict[str, list[float]] = {}
    for numbers in (*paper.LDS_CLASSIFICATION.values(), paper.LDS_LANGUAGE, *paper.LDS_DIFFUSION.values()):
        for method, (plain, weighted) in numbers.items():
            theirs.setdefault(method, []).append(weighted[0] - plain[0])
    rows = []
    for method, gains in theirs.items():
        row = [method, f"{_span(gains)} ({len(gains)})"]
        for banks in (reliable(book), list(BANKS)):
            found = differences(book, "search", banks).values()
            ours = [100 * cells[method]["mean"] for cells in found if method in cells]
            row.append(f"{_span(ours)} ({len(ours)})" if ours else NONE)
        rows.append(row)
    return table(["", "paper (data sets)", "searched, banks that can tell", "searched, all banks"], rows)


def _span(values: Sequence[float]) -> str:
    ends = [number(f(values), sign=True) for f in (min, max)]
    return ends[0] if len(values) == 1 else " to ".join(ends)


def choice(book: Book) -> str:
    """What was chosen, counted over all cells, and what choosing on the evaluation adds."""
    rows = [row for bank in BANKS for row in methods_of(book, bank).values()]
    if not rows:
        return f"Not measured: `{command('lds')}`."
    found = [point for row in rows for point in row["rules"]["search"]["chosen"]]
    more = [
        100 * (row["rules"]["best"]["difference"]["mean"] - row["rules"]["search"]["difference"]["mean"])
        for row in rows
    ]
    harmed = [
        row for row in rows if row["by k"].get("500", {"difference": {"mean": 0}})["difference"]["mean"] < 0
    ]
    return (
        f"Over the {len(rows)} cells measured here the search chose k ≤ 10 in {sum(k <= 10 for k, _ in found)} of "
        f"{len(found)} halves and λ′ ≤ 0.1 in {sum(d <= 0.1 for _, d in found)}; choosing on the evaluation adds "
        f"{number(sum(more) / len(more), sign=True)} points to what the search gets ({_span(more)}). At k = 500 and "
        f"λ′ = 0.5 weights lower LDS in {len(harmed)} cells."
    )


def rules_summary(book: Book) -> str:
    return table(
        ["weights", *_two("banks that can tell"), *_two("all banks")], _counts(book, RULES, reliable(book))
    )


def _two(where: str) -> tuple[str, str]:
    return f"{where}: better / worse, of cells", "LDS, points"


def _counts(book: Book, rules: Iterable[str], sure: Sequence[str]) -> list[list[str]]:
    rows = []
    for rule in rules:
        row = [RULES[rule]]
        for banks in (sure, list(BANKS)):
            found = differences(book, rule, banks)
            c = count({bank: list(cells.values()) for bank, cells in found.items()}) if found else None
            row += [NONE, NONE] if c is None else [f"{c.better} / {c.worse}, of {c.cells}", c.mean]
        rows.append(row)
    return rows


def waiting(book: Book) -> str:
    names = ", ".join(f"`{b}`" for b in BANKS if book.get(f"lds_{b}") is None)
    return (
        f"Not measured with the present version: {names} (`python -m experiments run lds`)." if names else ""
    )


def forest(book: Book) -> str:
    rules = [rule for rule in ("search", "calibrated") if differences(book, rule)]
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
    marked = {rule: marks(book, rule) for rule in RULES}
    found = {bank: of_bank(book, bank) for bank in banks}
    methods = dict.fromkeys(
        [m for rows in printed_in.values() for m in rows]
        + [m for there in found.values() if there for m in there["methods"]]
    )
    shown_rules = ("best", "search", "fixed", "calibrated", "fitted")
    blank = [""] * (len(shown_rules) - 1)
    rows: list[list[str]] = []
    for method in methods:
        first = len(rows)
        for where, numbers in printed_in.items():
            if method in numbers:
                plain, weighted = numbers[method]
                gain = f"{number(weighted[0] - plain[0], sign=True)} (to {number(weighted[0])} ± {weighted[1]:.2f})"
                rows.append(["", f"paper: {where}", f"{number(plain[0])} ± {plain[1]:.2f}", gain, *blank])
        for bank, there in found.items():
            name = BANKS[bank].name
            if there is None:
                rows.append(["", name, f"not measured: `{command(f'lds_{bank}')}`", "", *blank])
            elif method in there["methods"]:
                row = there["methods"][method]
                cells = [
                    shown(row["rules"][r]["difference"], sign=True) + marked[r].get((bank, method), "")
                    if r in row["rules"]
                    else NONE
                    for r in shown_rules
                ]
                rows.append(["", name, shown(row["unweighted"]), *cells])
        if len(rows) > first:
            rows[first][0] = f"**{method}**"
    for bank, there in found.items():
        for title, estimate in (there or {"baselines": {}})["baselines"].items():
            rows.append([f"**{title}**", BANKS[bank].name, shown(estimate), "", *blank])
    return table(["", "data", "w/o w", *(HEADS[rule] for rule in shown_rules)], rows)


def settings_table(book: Book, *banks: str) -> str:
    """What was chosen in each cell."""
    rows = []
    for bank in banks:
        for method, row in (of_bank(book, bank) or {"methods": {}})["methods"].items():
            found, best = row["rules"]["search"], row["rules"]["best"]
            dampings = ", ".join(dict.fromkeys("–" if d is None else f"{d}" for d in row["dampings"]))
            chosen = "; ".join(dict.fromkeys(f"{k}, {d:g}" for k, d in found["chosen"]))
            used = row["rules"].get("calibrated")
            rows.append([
                f"{BANKS[bank].name}, {method}", " / ".join(number(100 * v, 1) for v in row["by damping"]),
                dampings, chosen, "{}, {:g}".format(*best["chosen"]),
                NONE if used is None else f"{used['used']} of {used['of']}",
            ])  # fmt: skip
    at = " / ".join(f"{d:g}" for d in DAMPINGS)
    head = ["", f"w/o w at damping {at}", "chosen damping", "searched: k, λ′", "best: k, λ′"]
    return table([*head, "calibrations that used weights"], rows)


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
    "gains": gains_table,
    "choice": choice,
    "lead": lead,
    "summary": summary_table,
    "forest": forest,
    "waiting": waiting,
    "lds": lds_table,
    "lds_beside_paper": beside_paper,
    "rules": rules_summary,
    "chosen": settings_table,
    "smaller": smaller,
    "reliability": reliability,
}
