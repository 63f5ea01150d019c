"""What attribution is good for: wrong labels, tail-patch, recall of known contributors, texts to read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import paper_numbers as paper
from experiments.pages import figures
from experiments.pages.bank_results import methods_of
from experiments.pages.book import NONE, Book, command, number, paragraphs, shown, table
from experiments.pages.labels import interval

# --- wrong labels ----------------------------------------------------------------------------------------

ARCHITECTURES = {"resnet": "ResNet-18", "vit": "ViT-B/16"}
DATA = {"mislabel_auc_cifar10": "CIFAR-10", "mislabel_auc_mnist": "MNIST"}
KINDS = ("unweighted", "weighted")


def mislabel_table(book: Book, scale: str = "normalised") -> str:
    """AUC of a ranking over trainings: `normalised` self-influence, the `raw` one, or the `divisor`."""
    rows = []
    for architecture, theirs in ARCHITECTURES.items():
        for method, (plain, weighted) in paper.MISLABEL_AUC[theirs].items():
            first = f"**{method}**"
            if scale == "normalised":
                gain = number(weighted - plain, sign=True)
                rows.append([first, f"paper: ImageNet, {theirs}", f"{plain:.2f}", f"{weighted:.2f}", gain])
                first = ""
            for name, title in DATA.items():
                found, label = book.get(name), f"{title}, {theirs.split('-')[0]}"
                if found is None:
                    rows.append([first, label, f"not measured: `{command(name)}`", "", ""])
                    continue
                one, other = (
                    100 * np.array(found[f"{architecture} {method}"][f"{kind} {scale}"]) for kind in KINDS
                )
                cells = interval(one, digits=2), interval(other, digits=2)
                rows.append([first, label, *cells, interval(other - one, sign=True, digits=2)])
                first = ""
    return table(["", "data", "w/o w", "w: k = 5, λ′ = 0.5", "paired difference"], rows)


# --- tail-patch ------------------------------------------------------------------------------------------

WEIGHED = ("w/o w", "w: k = 5, λ′ = 0.5", "paired difference")
CORPORA = {"language_tail_patch_wikitext": "WikiText-2", "language_tail_patch_sotu": "State of the Union"}
LLAMA = {"llama_tail_patch": "State of the Union"}


def tail_patch_table(
    book: Book, printed_in: Mapping[str, paper.TailPatch], results: Mapping[str, str]
) -> str:
    found = {name: book.get(name) for name in results}
    methods = dict.fromkeys(
        [m for numbers in printed_in.values() for m in numbers]
        + [m for there in found.values() if there for m, row in there.items() if _is_cell(row)]
    )
    rows = []
    for method in methods:
        for where, numbers in printed_in.items():
            if method in numbers:
                plain, weighted, gain = numbers[method]
                paired = NONE if gain is None else f"{number(gain[0], sign=True)} ± {gain[1]:.2f}"
                cells = [number(plain), number(weighted), paired]
                rows.append([f"**{method}**", f"paper: {where}", *cells])
        for name, title in results.items():
            if found[name] is None:
                rows.append(["", title, f"not measured: `{command(name)}`", "", ""])
            elif method in found[name]:
                first = "" if any(method in numbers for numbers in printed_in.values()) else f"**{method}**"
                rows.append([first, title, *_patched(found[name][method])])
    return table(["", "data", *WEIGHED], rows) if rows else book.missing(results)


def _is_cell(row: Any) -> bool:
    return isinstance(row, Mapping) and ("per_token" in row or "unweighted" in row)


def _patched(row: Mapping[str, Any]) -> list[str]:
    if "per_token" in row:  # a baseline: there are no groups to weigh
        return [shown(row["per_token"], 1), NONE, NONE]
    return _weighed({kind: row[kind]["per_token"] for kind in KINDS}, row["differences"], digits=3)


def _weighed(found: Mapping[str, Any], differences: Mapping[str, Any], digits: int) -> list[str]:
    """Without weights, and with those of each kind: what was found, and the paired difference."""
    cells = [shown(found["unweighted"], 1)]
    for kind, difference in differences.items():
        cells += [shown(found[kind], 1), shown(difference, 1, digits=digits, sign=True)]
    return cells


def tail_patch(book: Book) -> str:
    return tail_patch_table(book, {"WikiText-103, GPT-2-small": paper.TAIL_PATCH_WIKITEXT}, CORPORA)


def llama(book: Book) -> str:
    results = {"llama_tail_patch": "State of the Union, Llama-like"}
    return tail_patch_table(book, {"OpenWebText, Llama3-8B-Instruct": paper.TAIL_PATCH_LLAMA}, results)


# --- recall ----------------------------------------------------------------------------------------------

ATTRIBUTES = ("subject", "style", "background")
PICTURES = ("robots", "emoji")
RECALL_RULES = {"": "k = 5, λ′ = 0.5", ", search": "searched", ", hubs divided out": "hubs divided out"}


def recall_table(book: Book, name: str, split: str, beside_paper: str = "") -> str:
    """The paper's rows and columns; ours below each."""
    found = book.get(f"fine_grained_recall_{name}")
    rows = []
    for target, numbers in paper.RECALL[split].items():
        if beside_paper:
            rows.append([f"**{target}**", "paper: SB-Pokemon", *(f"{v:.1f}" for v in numbers)])
        if found is not None:
            got, first = found[split]["recall"][target], "" if beside_paper else f"**{target}**"
            rows.append([first, name, *(shown(got[a], digits=1) for a in (*ATTRIBUTES, "all"))])
    if found is None:
        rows.append(["", name, f"not measured: `{command(f'fine_grained_recall_{name}')}`", "", "", ""])
    return table(["weights for", "data", "subject", "style", "background", "all three"], rows)


def recall_gains_table(book: Book, name: str) -> str:
    """What weights for an attribute change in the recall of that attribute."""
    found = book.get(f"fine_grained_recall_{name}")
    if found is None:
        return ""
    splits = [s for s in found if isinstance(found[s], dict) and "difference" in found[s]]
    rows = [
        [
            f"{s}: {rule}",
            *(shown(found[s]["difference"][f"{a}{suffix}"][a], digits=1, sign=True) for a in ATTRIBUTES),
        ]
        for s in splits
        for suffix, rule in RECALL_RULES.items()
        if all(f"{a}{suffix}" in found[s]["difference"] for a in ATTRIBUTES)
    ]
    return table(["queries: weights", *(f"weights for {a}: its recall" for a in ATTRIBUTES)], rows)


def heat_maps(book: Book) -> str:
    parts = [book.missing([f"fine_grained_recall_{name}" for name in PICTURES])]
    for title, found in book.results("fine_grained_recall", PICTURES).items():
        strength = found["strength"]
        maps = {
            a: (
                strength["rows"],
                strength["columns"],
                [[None if v is None or v != v else 100 * v for v in row] for row in strength["recall"][a]],
            )
            for a in ATTRIBUTES
        }
        words = f"Recall@10 (%) of each part of the UNet alone, {title}"
        parts.append(book.figure(f"recall-{title}", figures.heat(maps, title=words), words))
    return paragraphs(*parts)


def weights_over_the_network(book: Book) -> str:
    """Overall weights are those of the study of LDS, the others of the study of recall."""
    found = book.get("fine_grained_recall_robots")
    if found is None:
        return book.missing(["fine_grained_recall_robots"])
    sets = {f"weights for {name}": values for name, values in found["weights"].items()}
    groups = next(iter(sets.values()))
    cell = methods_of(book, "robots").get("D-TRAK")
    if cell is not None:
        values = cell["rules"]["fixed"]["weights"]
        if len(values) == len(groups):
            sets = {"weights for all": dict(zip(groups, values)), **sets}
    parts = []
    for title, values in sets.items():
        words = f"D-TRAK, {title}: robots, {len(values)} matrices of LoRA, mean 1"
        svg = figures.bars(values, title=words, unit="", block_of={g: _unet_block(g) for g in values})
        parts.append(book.figure(title.replace(" ", "-"), svg, words))
    return paragraphs(*parts)


# --- texts -----------------------------------------------------------------------------------------------


def qualitative(book: Book) -> str:
    """The first cases where weights change the top-1 passage; none is chosen."""
    parts = []
    for name, title, methods in (
        ("sotu_recall", "GPT-2-like", ("EKFAC", "weighted EKFAC")),
        ("llama_tail_patch", "Llama-like", ("LoGRA", "weighted LoGRA")),
    ):
        found = book.get(name)
        if found is None:
            parts.append(book.missing([name]))
            continue
        rows = [[_one_line(case[k]) for k in ("query", *methods)] for case in found["qualitative"]]
        parts += [f"### {title}", table([f"{title}: query", *methods], rows)]
    return paragraphs(*parts)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def speakers(book: Book) -> str:
    found = book.get("sotu_recall")
    if found is None:
        return book.missing(["sotu_recall"])
    parts = []
    for what in ("president", "decade"):
        rows = [["by chance", number(found[what]["chance"]), "", ""]]
        for title, row in found[what].items():
            if title != "chance":
                cells = (
                    [shown(row, 1), "", ""] if "mean" in row else _weighed(row, row["differences"], digits=2)
                )
                rows.append([title, *cells])
        parts.append(table([f"same {what}", *WEIGHED], rows))
    return paragraphs(*parts)


PARTS = {
    "mislabel_auc": mislabel_table,
    "tail_patch": lambda book: tail_patch_table(book, {}, CORPORA),
    "tail_patch_beside_paper": tail_patch,
    "llama_tail_patch": lambda book: tail_patch_table(book, {}, LLAMA),
    "llama_tail_patch_beside_paper": llama,
    "recall": recall_table,
    "recall_train": lambda book: recall_table(book, "robots", "train"),
    "recall_validation": lambda book: recall_table(book, "robots", "validation"),
    "recall_gains": lambda book, name="robots": recall_gains_table(book, name),
    "recall_gains_emoji": lambda book: recall_gains_table(book, "emoji"),
    "recall_maps": heat_maps,
    "weights_over_the_network": weights_over_the_network,
    "texts": qualitative,
    "speakers": speakers,
}


def _unet_block(name: str) -> str:
    """The block of a parameter; the first part of its name if it is outside of all blocks."""
    found = re.search(r"(?:down|up)_blocks\.\d+|mid_block", name)
    return name.partition(".")[0] if found is None else found[0]
