"""Pages from results: docs/results.md and its figures, and the marked tables of other pages.

docs/results.md is experiments/pages/results.md with its places filled in: `{{ lds cifar2 robots }}` is what the part
`lds` writes for these banks. Other pages take a part by its name:

    <!-- table: lds_cifar2 -->
    … whatever stands here is replaced …
    <!-- end -->

`PARTS` has the names. No number is copied by hand, and `python -m experiments render --check` fails if a page is not
what `render` would write.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from experiments import runner
from experiments.pages import (
    ablations,
    choices,
    downstream,
    extensions,
    label_free,
    labels,
    lds,
    outside,
    quality,
    settings,
    storage,
)
from experiments.pages import book as book_module
from experiments.pages.bank_results import BANKS
from experiments.pages.book import Book, command, table
from experiments.shared.paths import HERE

ROOT = HERE.parent
DOCS = ROOT / "docs"
TEMPLATE = HERE / "pages" / "results.md"
RESULTS_PAGE, FIGURES = DOCS / "results.md", DOCS / "figures"

PARTS: dict[str, Callable[..., str]] = {
    **lds.PARTS,
    **downstream.PARTS,
    **label_free.PARTS,
    **labels.PARTS,
    **ablations.PARTS,
    **extensions.PARTS,
    **settings.PARTS,
    **storage.PARTS,
    **quality.PARTS,
    **outside.PARTS,
    **choices.PARTS,
    "lds_resnet": lambda book: lds.lds_table(book, "cifar10-resnet", "mnist-resnet"),
    "lds_vit": lambda book: lds.lds_table(book, "cifar10-vit", "mnist-vit"),
    "lds_language": lambda book: lds.lds_table(book, "wikitext-gpt2", "sotu-gpt2", "finetuned-gpt2"),
    "lds_cifar2": lambda book: lds.lds_table(book, "cifar2"),
    "lds_robots": lambda book: lds.lds_table(book, "robots"),
    "contents": lambda book: "\n".join(f"- [{heading}](#{anchor(heading)})" for heading in sections()),
    "studies": lambda book: studies_table(),
}


def sections() -> dict[str, str]:
    """The template's sections that name a command, by heading."""
    found = [part.partition("\n") for part in re.split(r"^## ", TEMPLATE.read_text(), flags=re.M)[1:]]
    return {heading: text.strip() for heading, _, text in found if "Command: `" in text}


def anchor(heading: str) -> str:
    """As GitHub makes it.

    >>> anchor("LDS, language models (Table 2)")
    'lds-language-models-table-2'
    """
    return "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")


def shown_in(study: runner.Study) -> list[str]:
    """The headings of the sections whose command makes results of a study."""
    names = {study.name, *study.results()}
    commands = {
        h: re.search(r"Command: `python -m experiments run ([^`]*)`", text) for h, text in sections().items()
    }
    return [heading for heading, found in commands.items() if found and names & set(found[1].split())]


def studies_table() -> str:
    """Paper → command → result → where it is shown, of every study that there is."""
    rows = []
    for study in runner.studies().values():
        titles = {heading: re.sub(r" \((Table|Figure).*\)$", "", heading) for heading in shown_in(study)}
        links = ", ".join(f"[{title}](../docs/results.md#{anchor(h)})" for h, title in titles.items())
        variants = "*" if len(study.variants) > len(BANKS) else f"{{{', '.join(study.variants)}}}"
        files = study.name + (f"_{variants}" if study.variants else "") + ".json"
        rows.append([study.paper or "not in the paper", f"`{command(study.name)}`", f"`{files}`", links])
    return table(["in the paper", "command", "results", "shown in"], rows)


def part(book: Book, name: str, *words: str) -> str:
    if name not in PARTS:
        raise runner.Refused(f"no table is called {name!r}: known are {', '.join(PARTS)}")
    return PARTS[name](book, *words)


def placed(template: str, book: Book) -> str:
    return book_module.placed(template, lambda name, *words: part(book, name, *words))


def filled(text: str, book: Book) -> str:
    return book_module.filled(text, "table", lambda name: part(book, name))


def pages() -> list[Path]:
    others = [path for path in sorted(DOCS.glob("*.md")) if path != RESULTS_PAGE]
    tutorials = sorted((DOCS / "tutorials").glob("*.md"))
    return [ROOT / "README.md", HERE / "README.md", *others, *tutorials]


def written(book: Book) -> dict[Path, str]:
    """Every file that `render` writes, and what it writes."""
    out = {RESULTS_PAGE: placed(TEMPLATE.read_text(), book)}
    for path in pages():
        if path.exists():
            out[path] = filled(path.read_text(), book)
    return out | {FIGURES / name: svg for name, svg in book.figures.items()}


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
