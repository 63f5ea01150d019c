"""Tables of docs/speed.md about benchmarks that are files of their own, each from what that file found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.pages.book import table

from unde.console import size

Found = dict[str, Any]
NAMES = {"resnet": "ResNet-18", "vit": "ViT", "gpt2": "GPT-2", "llama": "Llama"}


def _queries(count: int) -> str:
    return f"{count:,} quer{'y' if count == 1 else 'ies'}"


def told(e: Found, digits: int = 2) -> str:
    """
    >>> told({"ratio": 0.631, "interval95": [0.62, 0.652]})
    '0.63 [0.62, 0.65]'
    """
    low, high = e["interval95"]
    return f"{e.get('ratio', e.get('seconds')):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]".replace(
        "-", "−"
    )


def mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB".replace("-", "−")


def languages(cases: dict[str, Found]) -> str:
    keys = list(dict.fromkeys(key for case in cases.values() for key in case["passes"]))
    head, rows = [""], [["plain pass"]]
    for name, case in cases.items():
        head += [f"{NAMES[name]}, 6 layers, 256 wide", "peak"]
        rows[0] += ["1", mib(case["peak_bytes"]["plain"]) if "peak_bytes" in case else ""]
    for key in keys:
        row = [_METHOD.get(key) or _pass_name(key)]
        for case in cases.values():
            row += [told(case["passes"][key]) if key in case["passes"] else "–", ""]
            if key in case.get("peak_bytes", {}):
                row[-1] = mib(case["peak_bytes"][key])
        rows.append(row)
    return table(head, rows)


_METHOD = {"frozen": "frozen pass without features", "EKFAC none": "EKFAC, unprojected"}


def _pass_name(key: str) -> str:
    if key.endswith("second pass"):
        return "its second pass"
    method, _, rank = key.partition(" ")
    return f"{method}, rank {rank}"


def fixed(found: Found) -> str:
    rows = []
    for r in found["rows"]:
        now = r["now"]
        low, high = now["interval95"]
        seconds = [f"{now['intercept']:.2f} s [{low:.2f}, {high:.2f}]", f"{found['goals'][r['case']]:.1f} s"]
        first = f"{now['first_build']:.2f} s"
        rows.append([f"{NAMES.get(r['case'], r['case'])}, rank {r['rank']}", *seconds, first])
    head = "| fixed cost of a build | aimed at | first build of a process"
    return table(head, rows)


def scoring(found: Found) -> str:
    size = f"{found['queries']:,} queries × {found['examples']:,} examples × {found['features']:,} features"
    rows = [(f"{name}, {size}", "sgemm of that shape", e) for name, e in found.get("totals", {}).items()]
    for e in found.get("groups", ()):
        rows += [
            (f"{e['groups']} groups, in blocks", "totals", e["blocks"]),
            (f"{e['groups']} groups, one array of {e['array_queries']:,} queries", "totals", e["array"]),
            (f"{e['groups']} groups, writing the output alone", "totals", e["writing"]),
        ]
    for part, where in (("stores", "page cache"), ("disk", "disk")):
        rows += [
            (f"{e['store']}, {_queries(e['queries'])}, from the {where}", "float32", e)
            for e in found.get(part, ())
            if e["store"] != "float32"
        ]
    for e in found.get("million", ()):
        what = f"top 100 of {e['examples']:,} × {e['features']:,} in int8 for {_queries(e['queries'])}, from the disk"
        rows.append((what, "reading the files", e))
    return table("| relative to | ratio | time", [[what, to, _ratio(e), _seconds(e)] for what, to, e in rows])


def _ratio(e: Found) -> str:
    spread = e.get("interval95") or e.get("range")
    return f"{e['ratio']:.2f} [{spread[0]:.2f}, {spread[1]:.2f}]" if spread else f"{e['ratio']:.2f}"


def _seconds(e: Found) -> str:
    took = f"{e['seconds']:.2f} s" if e["seconds"] >= 1 else f"{1e3 * e['seconds']:.0f} ms"
    return took + (f", at most {e['peak_bytes'] / 1e6:.0f} MB" if "peak_bytes" in e else "")


def weights(found: Found) -> str:
    rows: list[tuple[str, Found, str]] = []  # what, with its seconds and bytes, a remark
    for e in found.get("solvers", ()):
        shape = " × ".join(f"{n:,}" for n in e["shape"])
        remark = f"{e['times_faster']:.1f} times as fast, objective {e['objective_ratio']:.4f} of the other's"
        rows.append((f"fixed point, {shape}, k = {e['k']}", e["fixed-point"], remark))
        rows.append(("Algorithm 1 as it is written", e["adamw"], ""))
    if e := found.get("default"):
        rows.append((f"`learn_weights` as it is, k = {e['k']:,}", e, ""))
    if e := found.get("candidates"):
        rows.append((f"{e['candidates']} candidates of k and decay by Algorithm 1 at once", e, ""))
    if e := found.get("streamed"):
        for key, name in (("fixed-point", "fixed point"), ("adamw", "an epoch of Algorithm 1")):
            rows.append((f"{name}, in blocks within {mib(e['memory'])}", e[key], ""))
    if e := found.get("without_queries"):
        what = f"without queries, {e['examples']:,} examples, {e['groups']} groups, within {mib(e['memory'])}"
        rows.append((what, e, ""))
    return table(
        "| time | memory |",
        [
            [what, f"{e['seconds']:.1f} s", mib(e.get("bytes_beside_contributions", e.get("bytes"))), remark]
            for what, e, remark in rows
        ],
    )


def _best(way: Found) -> float:
    return way.get("best_ms", way["ms"])


def banks(found: Found) -> str:
    rows = []
    for row in found["rows"]:
        ways = {way: e for way, e in row["ways"].items() if "ms" in e}
        best = max(ways, key=lambda way: ways[way]["times_plain"])
        times = [f"{_best(e):.2f} ms" for e in (next(iter(ways.values())), ways[best])]
        rows.append([row["case"], *times, best, f"{ways[best]['times_plain']:.2f}", row.get("chosen", "")])
    head = "| a step of a model, plain loop | fastest way | which is | times as fast | what a bank takes"
    return table(head, rows)


def bank_floors(found: Found) -> str:
    rows = []
    for row in found["rows"]:
        if "floor" in row:
            floor, times = row["floor"], [_best(e) for e in row["ways"].values() if "ms" in e]
            share = f"{floor['ms'] / min(times):.0%}".replace("%", " %")
            cells = [f"{floor['gflop']:.2g}", f"{floor['ms']:.2g} ms", f"{times[0] / floor['ms']:.1f}", share]
            rows.append([row["case"], *cells])
    head = (
        "| GFLOP of a step | floor | times as fast as the plain loop at the floor | floor of the fastest way"
    )
    return table(head, rows)


def bank_rates(found: Found) -> str:
    """GFLOP a second of large products, by library."""
    rates: dict[str, float] = {}
    for row in found["rows"]:
        for library, rate in row.get("floor", {}).get("gflop_per_second", {}).items():
            rates[library] = max(rate, rates.get(library, 0.0))
    return " and ".join(f"{rate:.0f} by {library}" for library, rate in rates.items())


# NVIDIA A100 SXM with 80 GB, as published: float32 without TF32, its memory, and PCIe 4.0 × 16 in one direction.
A100 = {"flops": 19.5e12, "moved": 2.039e12, "copied": 32e9}
_LIMITS = {"flops": "products", "moved": "memory", "copied": "copies"}


def devices(found: Found) -> str:
    """Counts of stages, and the least time that an A100 could take for them."""
    rows = []
    for name, case in found.items():
        for stage, e in case["stages"].items():
            least = {what: e[what] / rate for what, rate in A100.items()}
            limit = max(least, key=lambda what: least[what])
            counts = [f"{e['operations']:,}", f"{e['flops'] / 1e9:,.3g}", size(e["moved"])]
            copies = [f"{e['copies']:,} ({size(e['copied'])})", f"{e['waits']:,}"]
            bound = f"{1e3 * least[limit]:,.2g} ms, by {_LIMITS[limit]}"
            rows.append([f"{NAMES[name]}, {stage}", *counts, *copies, bound])
    head = "| operations | GFLOP | read and written | copies | waits | at least, on an A100"
    return table(head, rows)


def device_ratio(found: Found) -> str:
    """The bound of features over that of a plain training pass, of each model."""
    ratios = []
    for name, case in found.items():
        a, b = (
            max(case["stages"][stage][what] / rate for what, rate in A100.items())
            for stage in ("features", "plain training pass")
        )
        ratios.append(f"{a / b:.2f} for {NAMES[name]}")
    return ", ".join(ratios)


def storage(found: Found) -> str:
    kinds = list(found["stores"]["float32"]["score"])
    rows = [
        [store, f"{e['bytes']:,.0f}", f"{e['times smaller']:.1f}", f"{e['build']:.2f}"]
        + [f"{e['score'][kind]:.2f}" for kind in kinds]
        for store, e in found["stores"].items()
    ]
    return table(
        ["", "bytes an example", "times smaller", "build", *(f"scores: {kind}" for kind in kinds)], rows
    )


# part → the benchmark that it is about, what writes it
PARTS: dict[str, tuple[str, Callable[[Found], str]]] = {
    "language": ("language", languages),
    "fixed": ("fixed", fixed),
    "storage": ("storage", storage),
    "storage_examples": ("storage", lambda found: f"{found['examples']:,}"),
    "storage_width": ("storage", lambda found: f"{found['width']:,}"),
    "scoring": ("scoring", scoring),
    "weights": ("weights", weights),
    "devices": ("devices", devices),
    "device_ratio": ("devices", device_ratio),
    "banks": ("banks", banks),
    "bank_floors": ("banks", bank_floors),
    "bank_rates": ("banks", bank_rates),
}
