"""What is not in the paper: trust, the rules of learning, what weights could do, and cheaper ground truth."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.pages import figures
from experiments.pages.bank_results import BANKS, RULES, methods_of
from experiments.pages.book import NONE, Book, number, paragraphs, shown, table
from experiments.pages.verdicts import COUNTED, count
from experiments.studies import trust_ranks as trust_ranks_study


def _average(values: list[float]) -> str:
    return number(fmean(values)) if values else NONE


def trust_curves(book: Book) -> str:
    """How well a method finds perturbed copies of training examples, by their strength, before and after weighting."""
    parts = []
    for bank, there in book.results("trust", BANKS).items():
        panels = {
            f"{BANKS[bank].name}, {m}": {"before": c["before"], "after": c["after"]}
            for m, c in there["curves"].items()
        }
        at = [f"{s:.2g}" for s in next(iter(there["curves"].values()))["strengths"]]
        title = f"Share of perturbed training examples that find themselves: {BANKS[bank].name}"
        svg = figures.lines(panels, at, title=title, x_label="strength of the perturbation")
        parts.append(book.figure(f"trust-{bank}", svg, title))
    return paragraphs(*parts)


def trust_correlations(book: Book) -> str:
    found = book.results("trust", BANKS)
    rows = [[BANKS[b].name, str(len(t["settings"])), number(t["spearman"])] for b, t in found.items()]
    rows.append(["mean", "", _average([t["spearman"] for t in found.values()])])
    return table(["bank", "settings", "correlation"], rows)


def trust_damping(book: Book, what: str = "") -> str:
    """What choosing the damping by the share would have changed, cell by cell, or the mean."""
    chosen = [
        (f"{BANKS[b].name}, {m}", d)
        for b, t in book.results("trust", BANKS).items()
        for m, d in t["damping"].items()
    ]
    if what == "mean":
        return _average([100 * d["difference"]["mean"] for _, d in chosen])
    rows = [[name, f"{d['damping']:g}", shown(d["difference"], sign=True)] for name, d in chosen]
    return table(["", "damping", "difference of LDS"], rows)


def trust_ranks(book: Book, what: str = "") -> str:
    """The same share against LDS over ranks of the projection, or the mean of a column."""
    found = book.results("trust_ranks", BANKS)
    cells = {f"{BANKS[b].name}, {m}": r for b, methods in found.items() for m, r in methods.items()}
    if what == "correlation":
        return _average([r["spearman"] for r in cells.values()])
    if what == "gain":
        return _average([100 * r["choice"]["difference"]["mean"] for r in cells.values()])
    if not cells:
        return book.missing([f"trust_ranks_{bank}" for bank in trust_ranks_study.VARIANTS])
    rows = []
    for name, r in cells.items():
        each = [f"{100 * x['trust']:.0f} / {100 * x['lds']['mean']:.2f}" for x in r["ranks"].values()]
        chosen = [str(r["choice"]["rank"]), shown(r["choice"]["difference"], sign=True)]
        rows.append([name, *each, number(r["spearman"]), *chosen])
    ranks = [f"rank {r}" for r in next(iter(cells.values()))["ranks"]]
    return table(["", *ranks, "correlation", "chosen", "difference of LDS to rank 16"], rows)


def learning_rules(book: Book) -> str:
    found = book.get("learning_rules")
    if found is None:
        return book.missing(["learning_rules"])
    rows = [
        [
            e["data set left out"],
            e["rule"],
            shown(e["pooled"], sign=True),
            *(str(e[k]) for k in ("better", "same", "worse")),
        ]
        for e in found
    ]
    head = ["data set left out", "rule", "pooled difference", "better", "no difference", "worse"]
    return table(head, rows)


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


def other_draws(book: Book, what: str = "") -> str:
    """What self-retrieval does with other seeds: cell by cell, or counted over all cells."""
    found = book.results("other_draws", BANKS)
    drawn: dict[str, dict[str, dict[str, Any]]] = {}  # seed → bank → method → difference
    for bank, methods in found.items():
        first = methods_of(book, bank)
        for method, row in methods.items():
            seeds = {s: c["difference"] for s, c in row["columns"].items()}
            if method in first:
                seeds["0"] = first[method]["rules"]["self-retrieval"]["difference"]
            for seed, difference in seeds.items():
                drawn.setdefault(seed, {}).setdefault(bank, {})[method] = difference
    seeds = sorted(drawn, key=int)
    if what == "counted":
        counts = {s: count({b: list(cells.values()) for b, cells in drawn[s].items()}) for s in seeds}
        return table(["seed", *COUNTED], [[seed, *c.row] for seed, c in counts.items()])
    rows = [
        [f"{BANKS[b].name}, {m}", *(shown(drawn[s].get(b, {}).get(m), sign=True) for s in seeds)]
        for b, methods in found.items()
        for m in methods
    ]
    return table(["", *(f"seed {s}" for s in seeds)], rows)


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


def query_agreement(book: Book) -> str:
    found = book.results("query_agreement", BANKS)
    if not found:
        return book.missing(["query_agreement"])
    columns = [k for k in next(iter(next(iter(found.values())).values())) if k != "unweighted"]
    rows = [
        [f"{BANKS[b].name}, {m}", *(shown(row[c], sign=True) for c in columns)]
        for b, t in found.items()
        for m, row in t.items()
    ]
    return table(["", *columns], rows)


PARTS = {
    "possible": possible,
    "other_draws": other_draws,
    "trust_correlations": trust_correlations,
    "trust_damping": trust_damping,
    "trust_curves": trust_curves,
    "trust_ranks": trust_ranks,
    "learning_rules": learning_rules,
    "local_retraining": local_retraining,
    "query_agreement": query_agreement,
    "missing": lambda book, study: book.missing([f"{study}_{bank}" for bank in BANKS]),
}
