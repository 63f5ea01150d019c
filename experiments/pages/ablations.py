"""What weights depend on: the paper's section 3.2 and its appendix, and what it does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import paper_numbers as paper
from experiments.pages import figures
from experiments.pages.bank_results import BANKS, methods_of, reliable
from experiments.pages.book import NONE, Book, command, half_width, number, paragraphs, shown, table
from experiments.studies.transfer_data_sets import FAMILIES, VARIANTS
from unde.evaluate import pattern_similarity

# --- sweeps: other k, losses, noise, other methods' and data sets' weights -------------------------------


def swept_table(
    results: Mapping[str, Any], study: str, columns: Sequence[str], theirs: Mapping[str, Sequence[str]]
) -> str:
    """Rows of the paper, {name: unweighted and columns}, then a row for each cell of ours, {bank: {method: …}}.

    Below the table, the banks that were not measured.
    """
    rows = [
        [f"paper: {name}", *values, *[""] * (len(columns) + 1 - len(values))]
        for name, values in theirs.items()
    ]
    for bank, found in results.items():
        for method, row in (found or {}).items():
            cells = [_marked(row["columns"].get(c)) for c in columns]
            rows.append([f"{BANKS[bank].name}, {method}", shown(row["unweighted"]), *cells])
    lacking = ", ".join(f"`{bank}`" for bank, found in results.items() if not found)
    return paragraphs(
        table(["", "w/o w", *columns], rows) if rows else "",
        f"Not measured (`{command(study)}`): {lacking}." if lacking else "",
    )


def swept_counts(book: Book, study: str) -> str:
    """Over all cells of a study: in how many a column is better and worse, as marked, and what it adds on average."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for bank, methods in book.results(study, BANKS).items():
        for method, row in methods.items():
            own = {"transfer_methods": method, "transfer_data_sets": bank}.get(study)
            for column, cell in row["columns"].items():
                kind = column if own is None else "its own" if column == own else "another's"
                found.setdefault(kind, []).append(cell)
    rows = []
    for kind, cells in found.items():
        signs = [_marked(cell)[-1] for cell in cells]
        mean = 100 * sum(cell["difference"]["mean"] for cell in cells) / len(cells)
        rows.append(
            [kind, f"{signs.count('▲')} / {signs.count('▼')}, of {len(cells)}", number(mean, sign=True)]
        )
    return table(["weights", "better / worse, of cells", "LDS, points on average"], rows) if rows else ""


def _each(book: Book, study: str, banks: Iterable[str] = BANKS) -> dict[str, Any]:
    return {bank: book.get(f"{study}_{bank}") for bank in banks}


def _marked(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return NONE
    d, text = cell["difference"], number(100 * cell["estimate"]["mean"])
    if not d or d["ci95"] is None:
        return text
    return text + (" ▲" if d["mean"] - half_width(d) > 0 else " ▼" if d["mean"] + d["ci95"] < 0 else "")


def all_columns(book: Book, study: str, banks: Sequence[str], key: Callable[[str], Any]) -> list[str]:
    found = (book.get(f"{study}_{bank}") or {} for bank in banks)
    return sorted({c for methods in found for row in methods.values() for c in row["columns"]}, key=key)


def sensitivity_to_k(book: Book) -> str:
    """Of every k at one λ′, by the study of LDS; the paper has the best λ′ of each."""
    columns = [*paper.K[1:], "200", "500", "1000", "5000"]
    theirs = {}
    for where, methods in paper.SENSITIVITY_TO_K.items():
        for method, values in methods.items():
            at = dict(zip(paper.K, values))
            theirs[f"{where}, {method}"] = [number(at.get(c)) for c in ("none", *columns)]
    found = {
        bank: {
            m: {"unweighted": row["rules"]["best"]["unweighted"], "columns": row["by k"]}
            for m, row in methods_of(book, bank).items()
        }
        for bank in BANKS
    }
    return swept_table(found, "lds", columns, theirs)


def grids(book: Book) -> str:
    """LDS on the evaluation over all (k, λ′), of banks that can tell."""
    parts = []
    for bank in reliable(book):
        maps = {}
        for method, row in methods_of(book, bank).items():
            values = {(k, decay): 100 * mean for k, decay, mean in row["grid"]}
            ks, decays = (sorted({point[i] for point in values}) for i in (0, 1))
            if len(values) == len(ks) * len(decays):
                table = [[values[k, decay] for decay in decays] for k in ks]
                maps[method] = ([f"k = {k}" for k in ks], [f"λ′ = {d:g}" for d in decays], table)
        if maps:
            title = f"{BANKS[bank].name}: LDS (%) under weights by Algorithm 1"
            svg = figures.heat(maps, title=title, digits=1)
            parts.append(book.figure(f"search-{bank}", svg, title))
    return paragraphs(*parts)


def losses(book: Book) -> str:
    theirs = {
        f"ArtBench-2, {method}": [number(mean) for mean, _ in values]
        for method, values in paper.LOSS_ABLATION.items()
    }
    return swept_table(_each(book, "loss_ablation"), "loss_ablation", paper.LOSSES[1:], theirs)


def noise(book: Book) -> str:
    """A figure, as in the paper, and the numbers."""
    columns = all_columns(book, "noise_sensitivity", tuple(BANKS), float)
    panels, flat = {}, {}
    for bank, setting in BANKS.items():
        found = book.get(f"noise_sensitivity_{bank}")
        if found and all(set(columns) <= set(row["columns"]) for row in found.values()):
            panels[setting.name] = {
                m: [100 * row["columns"][c]["estimate"]["mean"] for c in columns] for m, row in found.items()
            }
            flat[setting.name] = {m: 100 * row["unweighted"]["mean"] for m, row in found.items()}
    shown_figure = ""
    if panels:
        title = "LDS (%) with weights learned from noisy scores; dashed: unweighted"
        svg = figures.lines(panels, columns, title=title, x_label="noise, in standard deviations", flat=flat)
        shown_figure = book.figure("noise", svg, title)
    return paragraphs(
        shown_figure, swept_table(_each(book, "noise_sensitivity"), "noise_sensitivity", columns, {})
    )


def across_methods(book: Book) -> str:
    """One table for each kind of bank, since they have different methods."""
    theirs = {f"ArtBench-2, {m}": [number(v) for v in values] for m, values in paper.TRANSFER_METHODS.items()}
    kinds = (
        (("cifar2", "robots", "finetuned-unet"), (*paper.METHODS, "Journey-TRAK, per step"), theirs),
        (
            (
                "wikitext-gpt2",
                "sotu-gpt2",
                "finetuned-gpt2",
                "finetuned-lora",
                "finetuned-resnet",
                "finetuned-vit",
            ),
            ("TracIn", "TRAK", "LoGRA", "EKFAC"),
            {},
        ),
        (("cifar10-resnet", "mnist-resnet", "cifar10-vit", "mnist-vit"), ("TracIn", "TRAK"), {}),
    )
    study = "transfer_methods"
    return paragraphs(*(swept_table(_each(book, study, banks), study, *rest) for banks, *rest in kinds))


def across_data_sets(book: Book) -> str:
    rows = [
        [f"{where}, {method}", *map(number, values)]
        for where, methods in paper.TRANSFER_DATA_SETS.items()
        for method, values in methods.items()
    ]
    head = ["paper", "w/o w", "w", "w of the other (Naruto for ArtBench-2 and back)"]
    study = "transfer_data_sets"
    banks = [[bank for bank in family if bank in VARIANTS] for family in FAMILIES]
    ours = [swept_table(_each(book, study, b), study, f, {}) for b, f in zip(banks, FAMILIES, strict=True)]
    return paragraphs(table(head, rows), *ours)


# --- single groups ---------------------------------------------------------------------------------------


def strength_of(book: Book, bank: str) -> tuple[str, dict[str, Any]] | None:
    """The method that is shown (D-TRAK as in the paper, where there is one) and its LDS group by group."""
    found = book.get(f"group_strength_{bank}")
    if found is None:
        return None
    method = "D-TRAK" if "D-TRAK" in found else list(found)[-1]
    return method, found[method]


def single_groups(book: Book) -> str:
    parts = []
    for bank, setting in BANKS.items():
        found = strength_of(book, bank)
        parts.append(f"### {setting.name}")
        if found is None:
            parts.append(book.missing([f"group_strength_{bank}"]))
            continue
        method, values = found
        for what in ("groups", "blocks", "components"):
            if what in values:
                lds = {name: 100 * mean for name, (mean, _) in values[what].items()}
                halves = {name: 100 * half for name, (_, half) in values[what].items()}
                title = f"{setting.name}, {method}: LDS (%) of single {what}"
                by_block = values["block of"] if what == "groups" else None
                svg = figures.bars(lds, title=title, unit="%", block_of=by_block, halves=halves)
                parts.append(book.figure(f"strength-{bank}-{what}", svg, title))
    return paragraphs(*parts)


# --- likeness --------------------------------------------------------------------------------------------

ALIKE = {
    "ResNet": ("mnist-resnet", "cifar10-resnet"),
    "ViT on MNIST": ("mnist-vit",),
    "ViT on CIFAR-10": ("cifar10-vit",),
    "GPT-2-like": ("sotu-gpt2", "wikitext-gpt2", "finetuned-gpt2"),
    "CIFAR-2": ("cifar2",),
    "robots": ("robots",),
}


def patterns(book: Book, banks: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """{what: {setting: a number for each group}} of the models of a family, whose groups have the same order."""
    out: dict[str, dict[str, list[float]]] = {name: {} for name in paper.SIMILARITY}
    order: list[str] | None = None
    for bank in banks:
        for method, row in (book.get(f"group_strength_{bank}") or {}).items():
            order = order or list(row["groups"])
            if set(order) == set(row["groups"]):
                out["LDS of single groups"][f"{bank} {method}"] = [row["groups"][name][0] for name in order]
        for method, row in methods_of(book, bank).items():
            if order is None or len(row["groups"]) == len(order):  # not those on whole gradients
                out["learned weights"][f"{bank} {method}"] = row["rules"]["fixed"]["weights"]
    return out


def likeness(book: Book) -> str:
    rows = [
        [
            "paper: Stable Diffusion, three data sets, D-TRAK and TracIn",
            *(number(v, 3) for v in paper.SIMILARITY.values()),
        ]
    ]
    parts = []
    for family, banks in ALIKE.items():
        cells, maps = [], {}
        for what, found in patterns(book, banks).items():
            sizes = {len(v) for v in found.values()}
            if len(found) < 2 or len(sizes) > 1:
                cells.append("not measured" if len(sizes) < 2 else "the layers differ")
                continue
            alike = pattern_similarity({name: np.asarray(v) for name, v in found.items()})
            cells.append(number(float(alike.values[~np.eye(len(found), dtype=bool)].mean()), 3))
            maps[what] = (alike.rows, alike.columns, alike.values.tolist())
        rows.append([family, *cells])
        if maps:
            title = f"{family}: cosine similarity across data sets and methods"
            name = f"similarity-{banks[0]}"
            parts.append(book.figure(name, figures.heat(maps, title=title, digits=2), title))
    return paragraphs(table(["model", *paper.SIMILARITY], rows), *parts)


ROLES = {  # setting → training, weight learning, evaluation; the paper's Table 7 and ours
    "paper: ImageNet": (
        "50,000 of the training split (10 % corrupted for wrong labels only)",
        "1,000 others of the training split",
        "1,000 of the validation split; 5,000 corrupted training images",
    ),
    "MNIST, CIFAR-10": (
        "4,000 images (10 % corrupted for wrong labels only)",
        "500 others",
        "500 others; all 4,000",
    ),
    "paper: WikiText-103": (
        "232,585 sequences of 512 tokens of the training split",
        "523 of the test split",
        "487 of the validation split",
    ),
    "WikiText-2": (
        "3,072 training sequences of 64 tokens",
        "256 of its test split",
        "256 of its valid split",
    ),
    "State of the Union": (
        "2,048 sequences of 64 tokens",
        "256 others of the same addresses",
        "256 others again",
    ),
    "fine-tuning": (
        "1,500 sequences held out of pretraining",
        "250 others of the same documents",
        "250 others",
    ),
    "paper: CIFAR-2, ArtBench-2, Naruto, SB-Pokemon": (
        "5,000, 5,000, 1,221 and 600 images",
        "1,000 generated images (200 of train concepts for each attribute)",
        "1,000 generated with other seeds (500 a split for Recall@10)",
    ),
    "CIFAR-2": (
        "2,000 images",
        "200 generated images",
        "200 with other seeds; every other one chooses settings",
    ),
    "robots": (
        "600 pictures",
        "100 generated pictures (200 of train concepts for each attribute)",
        "100 with other seeds, every other one chooses settings (500 a split for Recall@10)",
    ),
}


def roles(book: Book) -> str:
    head = ["", "trains the model", "learns weights", "evaluates"]
    return table(head, [[name, *cells] for name, cells in ROLES.items()])


PARTS = {
    "swept": swept_counts,
    "roles": roles,
    "group_strength": single_groups,
    "likeness": likeness,
    "sensitivity_k": sensitivity_to_k,
    "grids": grids,
    "noise": noise,
    "losses": losses,
    "transfer_data_sets": across_data_sets,
    "transfer_methods": across_methods,
}
