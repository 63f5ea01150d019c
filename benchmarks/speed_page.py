"""docs/speed.md and the speed tables of other pages, from benchmarks/results. No number is copied by hand.

The page is benchmarks/speed.md with its {{ names }} filled in; other pages have marked tables:

<!-- bench: features -->
… whatever stands here is replaced …
<!-- end -->
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.pages import book
from experiments.pages.book import table

from benchmarks import other_tables, registry, speed_figure
from benchmarks.cases import CASES
from benchmarks.features import GOALS, MORE_MEMORY
from benchmarks.other_tables import NAMES, mib, told
from benchmarks.peers import PEERS

ROOT = Path(__file__).parent.parent
TEMPLATE = Path(__file__).parent / "speed.md"
PAGE, FIGURE = ROOT / "docs" / "speed.md", ROOT / "docs" / "growth.svg"
OTHERS = tuple(ROOT / "docs" / name for name in ("language-models.md", "diffusion.md", "scale.md"))
IMAGES_AND_TEXT, DIFFUSION = ("resnet", "vit", "gpt2", "llama"), ("ddpm", "text", "lora")
LESSER = ("traker", "captum", "kronfluence")  # these keep less of an example, or nothing
AXES = {"rank": "rank, ResNet-18", "tokens": "tokens of a sequence, GPT-2", "width": "width, GPT-2"}
Found = dict[str, Any]
Results = dict[str, Found]  # by name of the benchmark, with provenance


def results() -> Results:
    names = [*registry.benchmarks()]
    return {name: found for name in names if (found := registry.load(name)) is not None}


def write() -> list[Path]:
    found = results()
    PAGE.write_text(page(TEMPLATE.read_text(), found))
    written = [PAGE]
    for path in OTHERS:
        path.write_text(filled(path.read_text(), found))
        written.append(path)
    if "growth" in found:
        FIGURE.write_text(speed_figure.drawn(found["growth"]["found"]))
        written.append(FIGURE)
    return written


def page(template: str, found: Results) -> str:
    return book.placed(template, lambda name: PARTS[name](found))


def filled(text: str, found: Results) -> str:
    return book.filled(text, "bench", lambda name: PARTS[name](found))


def missing(name: str) -> str:
    return f"*Not measured yet: `python -m benchmarks run {name}`.*"


def _cases(found: Results, names: tuple[str, ...] = tuple(CASES)) -> dict[str, Found]:
    return {name: found[f"features.{name}"]["found"] for name in names if f"features.{name}" in found}


def machine(found: Results) -> str:
    """Of every machine that results are from; "devices" counts, and measures nothing."""
    lines = {}
    for result in (r for name, r in found.items() if name != "devices"):
        m, v = result["provenance"]["machine"], result["provenance"]["versions"]
        sets = ", ".join(m.get("sets", [])) or m.get("instructions", "")
        family = f", family, model and stepping {m['family']}" if m.get("family") else ""
        lines[
            f"{m['threads']} threads of {m['processor']}{family}{sets and f' ({sets})'}, torch {v['torch']}"
        ] = None
    return f"Measured on {'; '.join(lines)}." if lines else "Nothing is measured yet."


def features(found: Results) -> str:
    rows = []
    for name, case in _cases(found).items():
        a, b = case["ranks"]["16"], case["ranks"]["64"]
        frozen = told(a["frozen"])
        costs = [told(r[what]) for what in ("build", "overhead") for r in (a, b)]
        rows.append([f"{CASES[name].title}, batches of {case['batch']}", *costs[:2], frozen, *costs[2:]])
        if "int8" in a:
            costs = [told(r["int8"][what]) for what in ("build", "overhead") for r in (a, b)]
            rows.append(["in int8", *costs[:2], frozen, *costs[2:]])
    head = ["", "rank 16", "rank 64", "frozen pass", "overhead, rank 16", "rank 64"]
    return table(head, rows) if rows else missing("features")


def goals(found: Results) -> str:
    """Which cases are over what was aimed at."""
    over = []
    for name, case in _cases(found).items():
        for rank in GOALS:
            exact = case["ranks"][str(rank)]
            both = [of["overhead"]["ratio"] for of in (exact, exact.get("int8")) if of]
            if max(both) > GOALS[rank]:
                words = " and in int8 ".join(f"{value:.2f}" for value in both)
                over.append(f"{NAMES.get(name, CASES[name].title)} at rank {rank} ({words})")
    aim = f"Aimed at are {GOALS[16]:.2f} at rank 16 and {GOALS[64]:.2f} at rank 64"
    if not _cases(found):
        return f"{aim}."
    return f"{aim}; over that are {_listed(over)}." if over else f"{aim}, which all cases keep."


def denominators(found: Results) -> str:
    rows = []
    for name, case in _cases(found).items():
        for rank in GOALS:
            r = case["ranks"][str(rank)]
            through = f"{r['pass_size']}" + ("" if r["rows"] is None else f" ({r['rows']} rows at a time)")
            rows.append(
                [
                    f"{CASES[name].title}" if rank == 16 else "",
                    str(rank),
                    through,
                    told(r["plain of its pass size"]),
                    told(r["build to plain of its pass size"]),
                    told(r["overhead of plain of its pass size"]),
                    f"{r['multiplications']:.2f}" if "multiplications" in r else "–",
                    told(r["writing"]) if "writing" in r else "–",
                    f"{r['planning']['seconds']:.2f} s",
                ]
            )
    head = (
        "| rank | examples in a pass | plain pass of that size | index, of that | overhead, of that | "
        "multiplications of features | writing float32 alone | planning"
    )
    return table(head, rows) if rows else missing("features")


def peers(rank: str) -> Callable[[Results], str]:
    def made(found: Results) -> str:
        cases = _cases(found, IMAGES_AND_TEXT)
        if not any("peers" in case for case in cases.values()):
            return missing("features")
        rows = [["**unde**", *(told(case["ranks"][rank]["build"]) for case in cases.values())]]
        if all("int8" in case["ranks"][rank] for case in cases.values()):
            small = (told(case["ranks"][rank]["int8"]["build"]) for case in cases.values())
            rows.append(["**unde**, in int8", *small])
        for peer in PEERS:
            cells = []
            for case in cases.values():
                entry = case.get("peers", {}).get(peer, {})
                cells.append(told(entry[rank]) if rank in entry else "cannot" if "error" in entry else "–")
            rows.append([peer, *cells])
        return table(["", *(NAMES[name] for name in cases)], rows)

    return made


def verdict(found: Results) -> str:
    """Who is ahead, in words: by the ratio to our build of the same round."""
    ahead, even, lesser = [], [], []
    for name, case in _cases(found, IMAGES_AND_TEXT).items():
        for peer, entry in case.get("peers", {}).items():
            for rank in ("16", "64"):
                if rank not in entry:
                    continue
                low, high = entry[rank]["to ours"]["interval95"]
                times = [entry[rank][k] for k in ("to ours", "to ours in int8") if k in entry[rank]]
                share = ", in int8 ".join(f"{t['ratio']:.2f}" for t in times)
                words = f"{peer} on {NAMES[name]} at rank {rank} ({share} of our time)"
                if high < 1:
                    (lesser if peer in LESSER else ahead).append(words)
                elif low <= 1:
                    even.append(words)
    if not any("peers" in case for case in _cases(found).values()):
        return ""
    lines = [f"Ahead of us: {_listed(ahead)}." if ahead else "No library that keeps as much was ahead of us."]
    if even:
        lines.append(f"Even, within the noise: {_listed(even)}.")
    if lesser:
        lines.append(f"Faster because they do less: {_listed(lesser)}.")
    return " ".join(lines)


def peer_notes(found: Results) -> str:
    lines = []
    for peer, requirement in PEERS.items():
        entries = {n: c["peers"][peer] for n, c in _cases(found).items() if peer in c.get("peers", {})}
        if not entries:
            continue
        note = next((e["note"] for e in entries.values() if "note" in e), "")
        numbers = [
            f"{e['numbers']['16']:,} and {e['numbers']['64']:,} numbers ({NAMES.get(n, n)})"
            for n, e in entries.items()
            if set(e.get("numbers", {})) == {"16", "64"}
        ]
        kept = f": {', '.join(numbers)} at ranks 16 and 64" if numbers else ""
        lines.append(f"- *{requirement.replace('==', ' ')}*: {note}{kept}".rstrip(": "))
        errors: dict[str, list[str]] = {}
        for name, entry in entries.items():
            if "error" in entry:
                errors.setdefault(entry["error"], []).append(NAMES.get(name, name))
        lines += [f"  - cannot run {', '.join(names)}: `{error}`" for error, names in errors.items()]
    return "\n".join(lines)


def small(found: Results) -> str:
    cases = {n: c for n, c in _cases(found, IMAGES_AND_TEXT).items() if "small" in c}
    if not cases:
        return missing("features")
    who = ["ours", *(peer for peer in PEERS if any(peer in c["small"] for c in cases.values()))]
    rows = [
        [
            "**unde**" if w == "ours" else w,
            *(told(c["small"][w]) if w in c["small"] else "–" for c in cases.values()),
        ]
        for w in who
    ]
    return table(["", *(NAMES[name] for name in cases)], rows)


def small_count(found: Results) -> str:
    return next((str(c["small"]["examples"]) for c in _cases(found).values() if "small" in c), "a few")


def memory(found: Results) -> str:
    rows, worst = [], []
    for name, case in _cases(found).items():
        if "peak_bytes" not in case:
            continue
        p = case["peak_bytes"]
        over = [p[f"build at batch, rank {rank}"] - p["plain"] for rank in GOALS]
        rows.append(
            [
                CASES[name].title,
                mib(p["plain"]),
                *(f"{'+' if d > 0 else ''}{mib(d)}" for d in over),
                *(mib(p[f"build, rank {rank}"]) for rank in GOALS),
            ]
        )
        if max(over) > MORE_MEMORY:
            worst.append(CASES[name].title)
    if not rows:
        return missing("features")
    head = "| plain pass | rank 16 beyond it | rank 64 | passes as settled, rank 16 | rank 64"
    aim = f"Aimed at is at most {mib(MORE_MEMORY)} beyond the plain pass"
    return f"{table(head, rows)}\n\n{aim}" + (
        f"; over that are {_listed(worst)}." if worst else ", which all cases keep."
    )


def queries(found: Results) -> str:
    if "queries" not in found:
        return missing("queries")
    rows = []
    for key, e in found["queries"]["found"].items():
        name, _, method = key.partition(", ")
        numbers = [f"{e[k]:.1f} ms" for k in ("plain_ms", "product_ms", "first_query_ms")]
        rows.append([f"{NAMES.get(name, name)}, {method}", told(e), *numbers])
    return table(["", "one more query", "plain pass", "product", "the first query"], rows)


def growth(found: Results) -> str:
    if "growth" not in found:
        return missing("growth")
    rows = []
    for axis, curves in found["growth"]["found"].items():
        for number, (curve, e) in enumerate(curves.items()):
            first, last = e["sizes"][0], e["sizes"][-1]
            if "bytes" in e:
                exponent, cost = f"{e['exponent']:.2f}", f"{mib(e['bytes'][0])} to {mib(e['bytes'][-1])}"
            else:
                low, high = e["interval95"]
                exponent = f"{e['exponent']:.2f} [{low:.2f}, {high:.2f}]"
                cost = f"{e['seconds'][0]:.3g} to {e['seconds'][-1]:.3g} s"
            where = AXES.get(axis, axis) if number == 0 else ""
            rows.append([where, curve, f"{first:,} to {last:,}", exponent.replace("-", "−"), cost])
    made = table(["against", "cost of", "sizes", "exponent", "from, to"], rows)
    return f"{made}\n\n![Cost against size on logarithmic axes](growth.svg)"


def diffusion(found: Results) -> str:
    rows = []
    for name, case in _cases(found, DIFFUSION).items():
        r, p = case["ranks"]["16"], case.get("peak_bytes", {})
        per_second = case["examples"] / (r["build"]["ratio"] * case["plain"]["seconds"])
        peak = f"{mib(p['build, rank 16'])}, {mib(p['plain'])}" if p else "–"
        cells = [told(r["build"]), told(r["frozen"]), told(r["overhead"]), f"{per_second:.0f}", peak]
        rows.append([CASES[name].title, *cells])
    head = ["", "ratio", "frozen floor", "overhead", "images/s, each at 10 timesteps", "peak memory, plain"]
    return table(head, rows) if rows else missing("features")


def _of(name: str, write: Callable[[Found], str]) -> Callable[[Results], str]:
    return lambda found: write(found[name]["found"]) if name in found else missing(name)


def _listed(words: list[str]) -> str:
    """
    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


PARTS: dict[str, Callable[[Results], str]] = {
    "machine": machine,
    "features": features,
    "goals": goals,
    "denominators": denominators,
    "peers_16": peers("16"),
    "peers_64": peers("64"),
    "verdict": verdict,
    "peer_notes": peer_notes,
    "small": small,
    "small_count": small_count,
    "memory": memory,
    "queries": queries,
    "growth": growth,
    "diffusion": diffusion,
    **{part: _of(*given) for part, given in other_tables.PARTS.items()},
}
