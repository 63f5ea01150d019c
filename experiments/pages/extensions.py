"""What is not in the paper: trust, the rules of learning, what weights could do, and cheaper ground truth."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.pages import figures
from experiments.pages.bank_results import BANKS, RULES, of_bank
from experiments.pages.book import NONE, Book, Section, made_by, number, paragraphs, shown, table
from experiments.pages.verdicts import count

RANKED = ("mnist-resnet", "mnist-vit", "cifar10-resnet", "sotu-gpt2", "finetuned-gpt2")


def _each(book: Book, study: str) -> dict[str, Any]:
    """The results of a study by bank, of those that are there."""
    found = {bank: book.get(f"{study}_{bank}") for bank in BANKS}
    return {bank: result for bank, result in found.items() if result is not None}


def _average(values: list[float]) -> str:
    return number(fmean(values)) if values else NONE


def trust(book: Book) -> str:
    """How well a method finds perturbed copies of training examples, by their strength, before and after weighting."""
    found = _each(book, "trust")
    if not found:
        return book.missing([f"trust_{bank}" for bank in BANKS])
    parts = []
    for bank, there in found.items():
        panels = {
            f"{BANKS[bank].name}, {m}": {"before": c["before"], "after": c["after"]}
            for m, c in there["curves"].items()
        }
        at = [f"{s:.2g}" for s in next(iter(there["curves"].values()))["strengths"]]
        title = f"Share of perturbed training examples that find themselves: {BANKS[bank].name}"
        svg = figures.lines(panels, at, title=title, x_label="strength of the perturbation")
        parts.append(book.figure(f"trust-{bank}", svg, title))
    rows = [[BANKS[b].name, str(len(t["settings"])), number(t["spearman"])] for b, t in found.items()]
    rows.append(["mean", "", _average([t["spearman"] for t in found.values()])])
    chosen = [
        [f"{BANKS[b].name}, {m}", f"{d['damping']:g}", shown(d["difference"], sign=True)]
        for b, t in found.items()
        for m, d in t["damping"].items()
    ]
    mean = [d["difference"]["mean"] for t in found.values() for d in t["damping"].values()]
    words = (
        "The share of 60 training examples, used for nothing else, that find themselves when they are "
        "perturbed, before and after weights by self-retrieval. It tells whether a method recognises an "
        "example through a change, not whether its scores predict retrained models. How well the mean share "
        "over strengths ranks methods and dampings as LDS does, Spearman's correlation over the settings of "
        "each bank:"
    )
    damping = (
        "Choosing the damping of each method by that share, in place of the default 0.1, would have changed LDS by "
        f'{_average([100 * x for x in mean])} points on average; so `damping="auto"` does not '
        "choose by it. Cell by cell:"
    )
    return paragraphs(
        words,
        table(["bank", "settings", "correlation"], rows),
        damping,
        table(["", "damping", "difference of LDS"], chosen),
        *parts,
        book.missing([f"trust_{b}" for b in BANKS]),
        made_by("trust"),
    )


def trust_ranks(book: Book) -> str:
    """The same share against LDS over ranks of the projection."""
    found = _each(book, "trust_ranks")
    asked = [f"trust_ranks_{bank}" for bank in RANKED]
    if not found:
        return book.missing(asked)
    ranks = list(next(iter(next(iter(found.values())).values()))["ranks"])
    rows, ranked, mean = [], [], []
    for bank, methods in found.items():
        for method, r in methods.items():
            each = [f"{100 * x['trust']:.0f} / {100 * x['lds']['mean']:.2f}" for x in r["ranks"].values()]
            choice = r["choice"]
            chosen = [str(choice["rank"]), shown(choice["difference"], sign=True)]
            rows.append([f"{BANKS[bank].name}, {method}", *each, number(r["spearman"]), *chosen])
            ranked.append(r["spearman"])
            mean.append(100 * choice["difference"]["mean"])
    words = (
        "Of indexes of four ranks: the mean share (%) of perturbed training examples that find themselves, and "
        f"LDS (%). Spearman's correlation over ranks is {_average(ranked)} on average; taking the rank by the "
        f"share, in place of 16, changes LDS by {_average(mean)} points on average."
    )
    head = ["", *(f"rank {r}" for r in ranks), "correlation", "chosen", "difference of LDS to rank 16"]
    return paragraphs(words, table(head, rows), book.missing(asked), made_by("trust_ranks"))


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
    words = (
        "Rules of self-retrieval (target share, weight decay, number of copies, guard) were chosen on all "
        "data sets but one, and measured on that one. Pooled difference of LDS to unweighted, in points, 95 % "
        "over queries; cells are counted over queries alone here."
    )
    head = ["data set left out", "rule", "pooled difference", "better", "no difference", "worse"]
    return paragraphs(words, table(head, rows), made_by("rule_grid", "learning_rules"))


def possible(book: Book) -> str:
    """Every rule beside weights that were fitted to half of the retrained models, all judged on the other half."""
    names = tuple(RULES)
    halves: dict[str, dict[str, list[dict[str, Any]]]] = {rule: {} for rule in names}
    for bank in BANKS:
        for row in (of_bank(book, bank) or {"methods": {}})["methods"].values():
            if "half" in row["rules"].get("reference", {}):
                for rule in names:
                    halves[rule].setdefault(bank, []).append(row["rules"][rule]["half"])
    if not halves["reference"]:
        return book.missing([f"lds_{bank}" for bank in BANKS])
    rows = []
    for rule, cells in halves.items():
        c = count(cells)
        rows.append([RULES[rule], str(c.cells), f"{number(100 * c.pooled, sign=True)} ± {100 * c.ci95:.2f}"])
    words = (
        "The reference is w ≥ 0 fitted to the retrained models themselves: it maximises the mean correlation "
        "with half of them on the learning queries, weight decay by cross-validation. All rows are judged on "
        "the other half and on the evaluation queries, over the cells that have a reference (all but DAS, "
        "whose scores are no sums)."
    )
    return paragraphs(
        words, table(["weights", "cells", "mean difference of LDS, points"], rows), made_by("lds")
    )


def other_draws(book: Book) -> str:
    """What self-retrieval does with other seeds: over all cells, and cell by cell."""
    found = _each(book, "other_draws")
    if not found:
        return book.missing([f"other_draws_{bank}" for bank in BANKS])
    drawn: dict[str, dict[str, dict[str, Any]]] = {}  # seed → bank → method → difference
    for bank, methods in found.items():
        first = (of_bank(book, bank) or {"methods": {}})["methods"]
        for method, row in methods.items():
            seeds = {s: c["difference"] for s, c in row["columns"].items()}
            if method in first:
                seeds["0"] = first[method]["rules"]["self-retrieval"]["difference"]
            for seed, difference in seeds.items():
                drawn.setdefault(seed, {}).setdefault(bank, {})[method] = difference
    seeds = sorted(drawn, key=int)
    counted = []
    for seed in seeds:
        c = count({bank: list(cells.values()) for bank, cells in drawn[seed].items()})
        pooled = f"{number(100 * c.pooled, sign=True)} ± {100 * c.ci95:.2f}"
        counted.append([seed, *map(str, (c.cells, c.better, c.same, c.worse, c.worse_alone)), pooled])
    rows = [
        [f"{BANKS[b].name}, {m}", *(shown(drawn[s].get(b, {}).get(m), sign=True) for s in seeds)]
        for b, methods in found.items()
        for m in methods
    ]
    words = (
        "`index.learn_weights(seed=…)` draws the examples that it perturbs, and their copies. With the seed 0, as "
        "everywhere else on this page, and with others, counted as at the top:"
    )
    head = ["seed", "cells", "better", "no difference", "worse", "worse, uncorrected", "mean difference"]
    return paragraphs(
        words,
        table(head, counted),
        "Differences of LDS to unweighted, cell by cell and seed by seed; 0.00 ± 0.00: the guard refused.",
        table(["", *(f"seed {s}" for s in seeds)], rows),
        book.missing([f"other_draws_{b}" for b in BANKS]),
        made_by("other_draws"),
    )


def local_retraining(book: Book) -> str:
    found = _each(book, "local_retraining")
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
    words = (
        "LDS against models that were only trained on for an epoch on random halves, from the attributed "
        "model. Spearman's correlation of the two LDS over methods and dampings: whether the affordable one "
        "would choose the same settings. The cost of a model is relative to retraining it."
    )
    return paragraphs(
        words, table(["bank", "settings", "correlation", "cost"], rows), made_by("local_retraining")
    )


def query_agreement(book: Book) -> str:
    found = _each(book, "query_agreement")
    if not found:
        return book.missing(["query_agreement"])
    columns = [k for k in next(iter(next(iter(found.values())).values())) if k != "unweighted"]
    rows = [
        [f"{BANKS[b].name}, {m}", *(shown(row[c], sign=True) for c in columns)]
        for b, t in found.items()
        for m, row in t.items()
    ]
    words = (
        "Another objective without labels: scores of a query and of a perturbed copy of it should agree. "
        "Differences of LDS to unweighted. It is not in the package."
    )
    return paragraphs(words, table(["", *columns], rows), made_by("query_agreement"))


SECTIONS = [
    Section("What weights could do", "", ("lds",), possible),
    Section("Other draws", "", ("other_draws",), other_draws),
    Section("Trust curves", "", ("trust",), trust),
    Section("Trust and the rank of a projection", "", ("trust_ranks",), trust_ranks),
    Section(
        "Rules of learning, judged on data they were not chosen on",
        "",
        ("rule_grid", "learning_rules"),
        learning_rules,
    ),
    Section("Affordable ground truth", "", ("local_retraining",), local_retraining),
    Section("Agreement of a query with its copies", "", ("query_agreement",), query_agreement),
]
