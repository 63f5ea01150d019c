"""The study `outside`: settings of other libraries, beside their published figures."""

from __future__ import annotations

from experiments.pages.book import NONE, Book, number, shown, table
from experiments.studies.outside import ENSEMBLES

# LDS that dattri's charts show, read to ± 0.005; the damping of IF-CG is the best of a grid on this LDS
PUBLISHED = {
    "lr": {"IF-CG": 0.80, "LiSSA": 0.79, "TracIn": 0.33, "TRAK": (0.41, 0.64, 0.68)},
    "mlp": {"IF-CG": 0.258, "LiSSA": 0.137, "TracIn": 0.145, "TRAK": (0.114, 0.332, 0.447)},
}
NAMES = {"lr": "logistic regression", "mlp": "784-128-64-10"}


def mnist(book: Book) -> str:
    """One model: what needs no ensemble, and what dattri publishes."""
    rows, missing = [], []
    for kind, name in NAMES.items():
        found = book.get(f"outside_{kind}")
        if found is None:
            missing.append(f"outside_{kind}")
            continue
        for title, e in found["one model"].items():
            rows.append([f"{name}: {title}", shown(e, digits=1)])
        calibrated = found["calibrated"]
        told = f"{calibrated['setting']}{', weighted' if calibrated['weighted'] else ''}"
        expected = shown(calibrated["expected"], digits=1)
        rows.append(
            [f"{name}: calibrated ({told}; {expected} expected)", shown(calibrated["estimate"], digits=1)]
        )
        rows.append([f"{name}: reliability of the bank", number(100 * found["reliability"], 1)])
        for title, value in PUBLISHED[kind].items():
            if not isinstance(value, tuple):
                rows.append([f"{name}: *{title}, published by dattri*", number(100 * value, 1)])
    return "\n\n".join(
        filter(None, [table(["one model", "LDS"], rows) if rows else "", book.missing(missing)])
    )


def ensembles(book: Book) -> str:
    rows, missing = [], []
    for kind, name in NAMES.items():
        found = book.get(f"outside_{kind}")
        if found is None:
            missing.append(f"outside_{kind}")
            continue
        sizes = [found["ensembles"][str(n)] for n in ENSEMBLES]
        rows += [[f"{name}: {method}", *(shown(e[method], digits=1) for e in sizes)] for method in sizes[0]]
        trak = PUBLISHED[kind]["TRAK"]
        rows.append([f"{name}: *TRAK, published by dattri*", *(number(100 * v, 1) for v in trak)])
    head = ["kron(16), damping 0.1, unless stated", *(f"{n} model{'s' * (n > 1)}" for n in ENSEMBLES)]
    return "\n\n".join(filter(None, [table(head, rows) if rows else "", book.missing(missing)]))


def quanda(book: Book) -> str:
    found = book.get("outside_quanda")
    if found is None:
        return book.missing(["outside_quanda"])
    metrics = list(next(iter(found.values())))

    def cell(value: dict[str, float] | None) -> str:
        if value is None:
            return NONE
        interval = f" [{value['low']:.3f}, {value['high']:.3f}]" if value["low"] < value["high"] else ""
        return f"{value['score']:.3f}{interval}"

    return table(
        ["", *metrics], [[name, *(cell(row.get(m)) for m in metrics)] for name, row in found.items()]
    )


def facts(book: Book) -> str:
    found = book.get("outside_facts")
    if found is None:
        return book.missing(["outside_facts"])
    columns = list(next(iter(found["methods"].values())))
    rows = [[name, *(shown(row[c], digits=1) for c in columns)] for name, row in found["methods"].items()]
    return table(["", *columns], rows)


def facts_right(book: Book) -> str:
    found = book.get("outside_facts")
    return NONE if found is None else f"{number(100 * found['right'], 0)} %"


PARTS = {
    "outside_mnist": mnist,
    "outside_ensembles": ensembles,
    "outside_quanda": quanda,
    "outside_facts": facts,
    "outside_right": facts_right,
}
