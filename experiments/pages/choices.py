"""Removals and choices of training data: what retrained models made of them."""

from __future__ import annotations

from typing import Any

from experiments.pages.book import NONE, Book, half_width, number, paragraphs, table

REMOVED = {"digits": "digits, MLP", "cifar10": "CIFAR-10, CNN", "finetuned": "fine-tuned GPT-2-like model"}
KINDS = {"wikitext": "WikiText-2", "sotu": "addresses", "chats": "chats"}


def interval(e: dict[str, Any], digits: int = 3) -> str:
    """Mean ± half width of the 95 % interval over queries and seeds.

    >>> interval({"mean": 0.25, "ci95": 0.1, "ci95_total": 0.2})
    '+0.250 ± 0.200'
    """
    return f"{number(e['mean'], digits, sign=True)} ± {half_width(e):.{digits}f}"


def counterfactual_table(book: Book) -> str:
    """Each model: the rise of the loss beyond that of random removals, and flipped predictions."""
    parts = [_removals(book, variant) for variant in REMOVED if book.get(f"counterfactual_{variant}")]
    return paragraphs(*parts, book.missing(f"counterfactual_{variant}" for variant in REMOVED))


def _removals(book: Book, variant: str) -> str:
    found = book.get(f"counterfactual_{variant}")
    assert found is not None
    rankings = found["rankings"]
    ks = list(rankings["random"])
    flips = "flipped" in rankings["random"][ks[0]]
    head = ["", *(f"top {k}" for k in ks), *(f"flipped by up to {k}" for k in ks if flips)]
    rows = []
    for name, of_ks in rankings.items():
        cells = [interval(c["drop" if name == "random" else "excess"]) for c in of_ks.values()]
        shares = [f"{100 * c['flipped']:.0f} %" for c in of_ks.values()] if flips else []
        rows.append([f"{name} (all of the rise)" if name == "random" else name, *cells, *shares])
    of = "for each by itself" if found["of"] == "query" else "for all at once"
    about = f", sequences of {found['document']}" if "document" in found else ""
    title = (
        f"**{REMOVED[variant]}**: {found['examples']:,} training examples, {found['queries']} queries{about}, removed "
        f"{of}; {found['seeds']} seeds, {found['trainings']:,} trainings. Rise of the loss beyond "
        "that of random removals:"
    )
    return f"{title}\n\n{table(head, rows)}"


def selection_table(book: Book) -> str:
    """For each kind of text: the fall of the loss beyond that of random choices."""
    found = book.get("selection")
    if found is None:
        return book.missing(["selection"])
    choices, kinds = found["choices"], list(found["pool"])
    methods = [name.removesuffix(f" for {kinds[0]}") for name in choices if name.endswith(f" for {kinds[0]}")]
    head = ["", *(cell for kind in kinds for cell in (KINDS[kind], "of this kind"))]
    rows = []
    for method in methods:
        row = [method]
        for kind in kinds:
            gain = choices[f"{method} for {kind}"]["targets"][kind]["gain"]
            row += [
                interval(gain),
                f"{100 * found['share of each kind'][f'{method} for {kind}'][kind]:.0f} %",
            ]
        rows.append(row)
    random = [-choices["random"]["targets"][kind]["utility"]["mean"] for kind in kinds]
    rows.append(["loss after a random choice", *(c for x in random for c in (number(x, 3), NONE))])
    before = [found["pretrained loss"][kind] for kind in kinds]
    rows.append(["loss before", *(c for x in before for c in (number(x, 3), NONE))])
    sizes = ", ".join(f"{found['pool'][kind]:,} of {KINDS[kind]}" for kind in kinds)
    title = (
        f"{found['chosen']} sequences of a pool of {sum(found['pool'].values()):,} ({sizes}), chosen for one kind; "
        f"{found['seeds']} seeds. Fall of the loss on held-out sequences of this kind (nats a token) beyond that of "
        "random choices, and how much of the choice is of this kind."
    )
    measured = "LESS" in methods
    more = (
        ""
        if measured
        else "\n\nNot measured: LESS on whole gradients, `python -m experiments run selection`."
    )
    return f"{title}\n\n{table(head, rows)}{more}"


PARTS = {"counterfactual": counterfactual_table, "selection": selection_table}
