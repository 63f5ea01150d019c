"""Pages from results: docs/results.md and its figures, and the marked tables of other pages.

A page takes a table by its name:

    <!-- table: lds_cifar2 -->
    … whatever stands here is replaced …
    <!-- end -->

`TABLES` has the names. No number is copied by hand, and `python -m experiments render --check` fails if a page is not
what `render` would write.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from experiments import runner
from experiments.pages import ablations, calibration, downstream, extensions, labels, lds, settings, storage
from experiments.pages.book import Book, Section, command, table
from experiments.shared.paths import HERE

ROOT = HERE.parent
DOCS = ROOT / "docs"
RESULTS_PAGE, FIGURES = DOCS / "results.md", DOCS / "figures"
_MARKED = re.compile(r"^(<!-- table: (?P<name>[\w-]+) -->\n).*?^(<!-- end -->)", re.S | re.M)

SECTIONS: list[Section] = [
    *lds.SECTIONS[:2],
    downstream.SECTIONS[0],
    labels.SECTION,
    downstream.SECTIONS[1],
    lds.SECTIONS[2],
    downstream.SECTIONS[2],
    ablations.STRENGTH,
    *downstream.FIGURES,
    *ablations.APPENDIX,
    *downstream.TEXTS,
    lds.RELIABILITY,
    *extensions.SECTIONS,
    calibration.SECTION,
    *settings.SECTIONS,
    *storage.SECTIONS,
]

TABLES: dict[str, Callable[[Book], str]] = {
    "summary": lds.summary_table,
    "lds_resnet": lambda book: lds.lds_table(book, ("cifar10-resnet", "mnist-resnet"), {}),
    "lds_vit": lambda book: lds.lds_table(book, ("cifar10-vit", "mnist-vit"), {}),
    "lds_language": lambda book: lds.lds_table(book, ("wikitext-gpt2", "sotu-gpt2", "finetuned-gpt2"), {}),
    "lds_cifar2": lambda book: lds.lds_table(book, ("cifar2",), {}),
    "lds_robots": lambda book: lds.lds_table(book, ("robots",), {}),
    "mislabel_auc": downstream.mislabel_table,
    "tail_patch": lambda book: downstream.tail_patch_table(book, {}, downstream.CORPORA),
    "llama_tail_patch": lambda book: downstream.tail_patch_table(
        book, {}, {"llama_tail_patch": "State of the Union"}
    ),
    "recall_train": lambda book: downstream.recall_table(book, "fine_grained_recall_robots", "train", False),
    "recall_validation": lambda book: downstream.recall_table(
        book, "fine_grained_recall_robots", "validation", False
    ),
    "recall_gains": lambda book: downstream.recall_gains_table(book, "fine_grained_recall_robots"),
    "recall_gains_emoji": lambda book: downstream.recall_gains_table(book, "fine_grained_recall_emoji"),
    "calibration": calibration.calibration_table,
    "checkpoints": settings.checkpoints_table,
    "storage": storage.storage_table,
    "storage_kernels": storage.kernel_table,
    "label_rankings": lambda book: labels.rankings_table(book, "TRAK"),
    "studies": lambda book: studies_table(),
}


def studies_table() -> str:
    """Paper → command → result → where it is shown, of every study that there is."""
    rows = []
    for study in runner.studies().values():
        places = [s for s in SECTIONS if study.name in s.studies]
        links = ", ".join(f"[{s.title}](../docs/results.md#{s.anchor})" for s in places)
        files = study.name + ("_{" + ", ".join(study.variants) + "}" if study.variants else "") + ".json"
        rows.append([study.paper or "not in the paper", f"`{command(study.name)}`", f"`{files}`", links])
    return table(["in the paper", "command", "results", "shown in"], rows)


def results_page(book: Book) -> str:
    """All of docs/results.md."""
    contents = "\n".join(f"- [{s.heading}](#{s.anchor})" for s in SECTIONS)
    parts = [
        "# Results",
        "<!-- Written by `python -m experiments render` from experiments/results and experiments/paper_numbers.py. -->",
        "Every result of the paper beside ours. This page is written by a program from the files in "
        "`experiments/results`, which also say what made them and on which machine. All models here are small enough "
        "for one processor: what that means is said with each result. What was not measured yet is said too, with its "
        "command.",
        "## Do weights help?",
        lds.summary(book),
        "## Contents",
        contents,
        *(f"## {s.heading}\n\n{s.write(book).strip()}" for s in SECTIONS),
    ]
    return "\n\n".join(parts) + "\n"


def pages() -> list[Path]:
    """Where marked tables may stand."""
    others = [path for path in sorted(DOCS.glob("*.md")) if path != RESULTS_PAGE]
    tutorials = sorted((DOCS / "tutorials").glob("*.md"))
    return [ROOT / "README.md", HERE / "README.md", *others, *tutorials]


def filled(text: str, book: Book) -> str:
    """A page with its marked tables as they are now."""

    def fill(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TABLES:
            raise runner.Refused(f"no table is called {name!r}: known are {', '.join(TABLES)}")
        return f"{found[1]}{TABLES[name](book)}\n{found[3]}"

    return _MARKED.sub(fill, text)


def written(book: Book) -> dict[Path, str]:
    """Every file that `render` writes, and what it writes."""
    out = {RESULTS_PAGE: results_page(book)}
    out |= {FIGURES / name: svg for name, svg in book.figures.items()}
    for path in pages():
        if path.exists():
            out[path] = filled(path.read_text(), book)
    return out


def render(check: bool = False) -> list[Path]:
    """Writes what is not up to date and deletes figures that no page shows; returns those files. `check` only looks."""
    wanted = written(Book())
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    stale = [path for path in sorted(FIGURES.glob("*.svg")) if path not in wanted]
    if not check:
        FIGURES.mkdir(exist_ok=True)
        for path in changed:
            path.write_text(wanted[path])
        for path in stale:
            path.unlink()
    return changed + stale
