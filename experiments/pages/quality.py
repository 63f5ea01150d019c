"""LDS against bytes: the study `quality` over all banks, and other libraries on one of them."""

from __future__ import annotations

import json
import statistics
from typing import Any

import scipy.stats

from experiments import runner
from experiments.pages import figures
from experiments.pages.bank_results import BANKS
from experiments.pages.book import NONE, Book, number, shown, table
from experiments.shared.paths import HERE
from experiments.studies import poisoned_chats, quality

PEERS = HERE.parent / "benchmarks" / "results" / "quality_peers.json"
BANK = "finetuned-gpt2"
METHODS = ("TracIn", "TRAK, damping 0.1", "LoGRA, damping 0.1", "EKFAC, damping 0.1")
USUAL = METHODS[-1]
FAMILIES = (("kron(16)", "kron(64)"), ("factored(1)", "factored(4)", "factored(16)", "none"))


def _found(book: Book, bank: str) -> dict[str, dict[str, Any]]:
    """By features, of those that are there."""
    return {
        f: found
        for variant, (of, f) in quality.MEASURED.items()
        if of == bank and (found := book.get(f"quality_{variant}")) is not None
    }


def _percent(value: float | None) -> str:
    return NONE if value is None else number(100 * value, 1)


def _size(count: float) -> str:
    """
    >>> _size(980), _size(10192), _size(1325824)
    ('980 B', '10.2 kB', '1.33 MB')
    """
    for unit in ("B", "kB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} MB"


def quality_table(book: Book) -> str:
    """A row for each bank and features."""
    rows = []
    for bank, setting in BANKS.items():
        for features, r in _found(book, bank).items():
            best = r["settings"][r["best"]]
            chosen = [_percent(r[halves]["judged"]) for halves in ("8", "16")]
            plain = [_percent(r["settings"].get(name)) for name in METHODS]
            size = [_size(r["bytes"]), number(r["seconds"]["build"], 0)]
            ends = f"{_percent(best)} ({r['best']})"
            rows.append([setting.name, f"`{features}`", *size, *plain, *chosen, ends])
    head = (
        "bank | features | an example | build, s | TracIn | TRAK | LoGRA | EKFAC | chosen with 8 halves | with 16 | "
        "best setting"
    )
    return table(head, rows)


def quality_short(book: Book) -> str:
    """LDS of EKFAC at damping 0.1, and chosen with 16 halves, where two kinds of features were measured."""
    found = {bank: _found(book, bank) for bank in BANKS if bank not in quality.DENOISERS}
    found = {bank: r for bank, r in found.items() if len(r) > 1}
    features = [f for f in quality.FEATURES if any(f in r for r in found.values())]
    rows = [
        [BANKS[bank].name, *(_cell(r[f]) if f in r else NONE for f in features)] for bank, r in found.items()
    ]
    return table(["bank", *(f"`{f}`" for f in features)], rows) if rows else quality_missing(book)


def _cell(r: dict[str, Any]) -> str:
    return f"{_percent(r['settings'].get(USUAL))} / {_percent(r['16']['judged'])} ({_size(r['bytes'])})"


def quality_default(book: Book) -> str:
    """Images: the largest features of EKFAC that were measured beside what a small projection gets, all at 0.1."""
    rows = []
    for bank, setting in BANKS.items():
        found = _found(book, bank)
        large = next((f for f in ("none", "factored(16)", "factored(4)") if f in found), None)
        if "kron(16)" not in found or large is None or not bank.endswith(("resnet", "vit")):
            continue
        small = found["kron(16)"]
        cells = [f"{_with_interval(r, m)} ({_size(r['bytes'])})" for r, m in (
            *((small, m) for m in METHODS[1:]), (found[large], USUAL),
        )]  # fmt: skip
        rows.append([setting.name, *cells, f"`{large}`"])
    head = "bank | TRAK, `kron(16)` | LoGRA, `kron(16)` | EKFAC, `kron(16)` | EKFAC, large features | which"
    return table(head, rows) if rows else ""


def _with_interval(r: dict[str, Any], setting: str) -> str:
    """Over queries; older results have none."""
    half = r.get("ci95", {}).get(setting)
    return _percent(r["settings"][setting]) + ("" if half is None else f" ± {_percent(half)}")


def quality_missing(book: Book) -> str:
    lacking = {bank: [f for of, f in quality.MEASURED.values() if of == bank] for bank in BANKS}
    lacking = {bank: [f for f in fs if f not in _found(book, bank)] for bank, fs in lacking.items()}
    named = [f"{BANKS[bank].name} ({', '.join(fs)})" for bank, fs in lacking.items() if fs]
    command = f"`{runner.command('quality')}` measures what is not there"
    return f"Not measured ({command}): {'; '.join(named)}." if named else ""


def _peers() -> dict[str, Any]:
    return json.loads(PEERS.read_text()) if PEERS.exists() else {"results": {}}


def quality_peers(book: Book) -> str:
    rows = []
    for name, r in sorted(_peers()["results"].items(), key=lambda item: item[1]["lds"]["mean"]):
        s = r["seconds"]
        cells = [f"{s['before queries']:.0f}" if s["before queries"] else NONE, f"{s['queries']:.0f}"]
        rows.append([name, shown(r["lds"], digits=1), *cells, f"{r['bytes'] / 1e6:.0f} MB"])
    head = ["", "LDS", "before queries, s", "250 queries, s", "kept"]
    return table(head, rows) if rows else "Not measured: `python -m benchmarks.quality_peers`."


def quality_figure(book: Book) -> str:
    """Lines of projections (dashed) and of outer products for each bank, and peers as squares."""
    series: dict[str, list[list[figures.Point]]] = {}
    for bank, setting in BANKS.items():
        found = _found(book, bank)
        if bank in quality.DENOISERS or not found:
            continue
        points = {f: (r["bytes"], 100 * r["settings"][USUAL], f) for f, r in found.items()}
        series[setting.name] = [[points[f] for f in family if f in points] for family in FAMILIES]
    if not series:
        return ""
    n = next(iter(_found(book, BANK).values()))["examples"]
    peers = [
        (r["bytes"] / n, 100 * r["lds"]["mean"], name)
        for name, r in _peers()["results"].items()
        if not name.startswith("unde")
    ]
    title = "LDS (%) of EKFAC at damping 0.1 against bytes an example (dashed: projections)"
    return book.figure("quality", figures.against(series, peers, title=title, words=_size), title)


def poisoned(book: Book) -> str:
    """Share of the poison among the highest scores, mean and 95 % interval over seeds."""
    found = {variant: book.get(f"poisoned_chats_{variant}") for variant in poisoned_chats.VARIANTS}
    found = {variant: r for variant, r in found.items() if r is not None}
    if not found:
        return f"Not measured: `{runner.command('poisoned_chats')}`."
    first = next(iter(found.values()))["shares"]
    names = sorted(first, key=lambda name: -statistics.mean(first[name]))
    rows = [[name, *(_share(r["shares"][name]) for r in found.values())] for name in names]
    return table(["", *found], rows)


def _share(values: list[float]) -> str:
    mean, spread = statistics.mean(values), statistics.stdev(values)
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * spread / len(values) ** 0.5
    return f"{100 * mean:.0f} ± {100 * half:.0f}"


def conjugate(book: Book) -> str:
    """LDS of EKFAC and of conjugate gradients on the same queries."""
    r = book.get("conjugate_gradients_finetuned-gpt2")
    if r is None:
        return f"LDS was not measured: `{runner.command('conjugate_gradients')}`."
    rows = []
    for steps, (mean, half) in r["lds"].items():
        name = f"cg={steps}" if int(steps) else "EKFAC"
        gain = (
            "" if steps not in r["gain"] else "{:+.1f} ± {:.1f}".format(*(100 * x for x in r["gain"][steps]))
        )
        rows.append([name, f"{100 * mean:.1f} ± {100 * half:.1f}", gain, number(r["seconds"][steps], 0)])
    return table(["", f"LDS, {r['queries']} queries", "gain, query by query", "processor seconds"], rows)


PARTS = {
    "conjugate": conjugate,
    "poisoned": poisoned,
    "quality": quality_table,
    "quality_short": quality_short,
    "quality_default": quality_default,
    "quality_missing": quality_missing,
    "quality_peers": quality_peers,
    "quality_figure": quality_figure,
}
