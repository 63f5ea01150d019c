"""Sections of docs/speed.md about benchmarks that are files of their own, each from what that file found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.pages.book import table

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
        now, query = r["now"], r["query"]
        low, high = now["interval95"]
        rows.append(
            [
                f"{NAMES.get(r['case'], r['case'])}, rank {r['rank']}",
                f"{now['intercept']:.2f} s [{low:.2f}, {high:.2f}]",
                f"{found['goals'][r['case']]:.1f} s",
                f"{now['first_build']:.2f} s",
                f"{query['ratio']:.2f}",
                f"{query['first_ratio']:.2f}",
            ]
        )
    head = [
        "",
        "fixed cost of a build",
        "aimed at",
        "first build of a process",
        "one more query",
        "the first",
    ]
    return (
        "## Fixed costs\n\nWhat a build takes whatever its number of examples: seconds of builds of few examples, as a "
        "line through their number meets none. A query is relative to a plain pass of it.\n\n"
        + table(head, rows)
    )


def scoring(found: Found) -> str:
    rows = [
        [f"{name}, {found['queries']:,} queries × {found['examples']:,} examples × {found['features']:,} features",
         "sgemm of that shape", _ratio(e), _seconds(e["seconds"])]
        for name, e in found.get("totals", {}).items()
    ]  # fmt: skip
    for e in found.get("groups", ()):
        rows.append(
            [
                f"{e['groups']} groups, in blocks",
                "totals",
                _ratio(e["blocks"]),
                _seconds(e["blocks"]["seconds"]),
            ]
        )
        what = f"{e['groups']} groups, one array of {e['array_queries']:,} queries"
        rows.append([what, "totals", _ratio(e["array"]), _seconds(e["array"]["seconds"])])
        if "writing" in e:  # not in results of before
            alone = [f"{e['groups']} groups, writing the output alone", "totals", _ratio(e["writing"])]
            rows.append([*alone, _seconds(e["writing"]["seconds"])])
    for part, where in (("stores", "page cache"), ("disk", "disk")):
        for e in found.get(part, ()):
            if e["store"] != "float32":
                what = f"{e['store']}, {_queries(e['queries'])}, from the {where}"
                rows.append([what, "float32", _ratio(e), _seconds(e["seconds"])])
    for e in found.get("million", ()):
        what = f"top 100 of {e['examples']:,} × {e['features']:,} in int8 for {_queries(e['queries'])}, from the disk"
        most = (
            f", at most {e['peak_bytes'] / 1e6:.0f} MB" if "peak_bytes" in e else ""
        )  # not in results of before
        rows.append([what, "reading the files", _ratio(e), _seconds(e["seconds"]) + most])
    head = ["", "relative to", "ratio", "time"]
    return (
        "## Scoring\n\nScores relative to torch's own product of the same matrices, to reading the same files, and to "
        "one another:\n\n"
        + table(head, rows)
        + "\n\nTotals are below torch's product where oneDNN is the faster library. Scores by group and from int8 "
        "are measured against totals and float32, which gain most from it. Scores by group take the multiplications of "
        "totals and M times their output. Nothing that returns the whole array goes below the larger of totals and of "
        "writing the output alone, a number into new memory; their sum is what it costs where the two do not overlap."
    )


def _ratio(e: Found) -> str:
    spread = e.get("interval95") or e.get("range")
    return f"{e['ratio']:.2f} [{spread[0]:.2f}, {spread[1]:.2f}]" if spread else f"{e['ratio']:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def weights(found: Found) -> str:
    rows = []
    for e in found.get("solvers", ()):
        shape = " × ".join(f"{n:,}" for n in e["shape"])
        solver, other = e["fixed-point"], e["adamw"]
        rows += [
            [
                f"fixed point, {shape}, k = {e['k']}",
                f"{solver['seconds']:.1f} s",
                mib(solver["bytes_beside_contributions"]),
                f"{e['times_faster']:.1f} times as fast, objective {e['objective_ratio']:.4f} of the other's",
            ],
            [
                "Algorithm 1 as it is written",
                f"{other['seconds']:.1f} s",
                mib(other["bytes_beside_contributions"]),
                "",
            ],
        ]
    if e := found.get("default"):
        what = f"`learn_weights` as it is, k = {e['k']:,}"
        rows.append([what, f"{e['seconds']:.1f} s", mib(e["bytes_beside_contributions"]), ""])
    if e := found.get("candidates"):
        what = f"all {e['candidates']} candidates of k and decay"
        rows.append([what, f"{e['seconds']:.1f} s", mib(e["bytes_beside_contributions"]), ""])
    if e := found.get("streamed"):
        budget = f"within {mib(e['memory'])}"
        for key, name in (("fixed-point", "fixed point"), ("adamw", "an epoch of Algorithm 1")):
            rows.append(
                [f"{name}, in blocks {budget}", f"{e[key]['seconds']:.1f} s", mib(e[key]["bytes"]), ""]
            )
    if e := found.get("self_retrieval"):
        what = f"self-retrieval, {e['examples']:,} examples, {e['groups']} groups, within {mib(e['memory'])}"
        rows.append([what, f"{e['seconds']:.1f} s", mib(e["bytes"]), ""])
    return (
        "## Learning weights\n\nFrom group scores (queries × examples × groups) in memory; bytes are beside them.\n\n"
        + table(["", "time", "memory", ""], rows)
    )


def banks(found: Found) -> str:
    rows = []
    for row in found["rows"]:
        ways = {way: e for way, e in row["ways"].items() if "ms" in e}
        best = max(ways, key=lambda way: ways[way]["times_plain"])
        plain = next(iter(ways.values()))
        rows.append(
            [
                row["case"],
                f"{plain.get('best_ms', plain['ms']):.2f} ms",
                f"{ways[best].get('best_ms', ways[best]['ms']):.2f} ms",
                best,
                f"{ways[best]['times_plain']:.2f}",
                row.get("chosen", ""),
            ]
        )
    head = [
        "",
        "a step of a model, plain loop",
        "fastest way",
        "which is",
        "times as fast",
        "what a bank takes",
    ]
    return (
        "## Retraining banks\n\nTraining many small models on random halves of the data, best of several turns "
        "(`python -m benchmarks run banks` prints all ways):\n\n" + table(head, rows) + _bank_floors(found)
    )


def _bank_floors(found: Found) -> str:
    """What arithmetic alone allows; not in results of before."""
    rows, rates = [], {}
    for row in found["rows"]:
        if "floor" not in row:
            continue
        floor, ways = row["floor"], [e for e in row["ways"].values() if "ms" in e]
        best = min(e.get("best_ms", e["ms"]) for e in ways)
        plain = ways[0].get("best_ms", ways[0]["ms"])
        for library, rate in floor["gflop_per_second"].items():
            rates[library] = max(rate, rates.get(library, 0.0))
        rows.append(
            [
                row["case"],
                f"{floor['gflop']:.2g}",
                f"{floor['ms']:.2g} ms",
                f"{plain / floor['ms']:.1f}",
                f"{floor['ms'] / best:.0%}".replace("%", " %"),
            ]
        )
    if not rows:
        return ""
    told = " and ".join(f"{rate:.0f} by {library}" for library, rate in rates.items())
    return (
        "\n\nNo way goes below the arithmetic of a step, at the rate of large float32 products on all cores (GFLOP a "
        f"second: {told}). What is left is memory: norms, activations and optimizers multiply little and move much.\n\n"
        + table(
            [
                "",
                "GFLOP of a step",
                "floor",
                "times as fast as the plain loop at the floor",
                "floor of the fastest way",
            ],
            rows,
        )
    )


def storage(found: Found) -> str:
    kinds = list(found["stores"]["float32"]["score"])
    rows = [
        [store, f"{e['bytes']:,.0f}", f"{e['times smaller']:.1f}", f"{e['build']:.2f}"]
        + [f"{e['score'][kind]:.2f}" for kind in kinds]
        for store, e in found["stores"].items()
    ]
    head = ["", "bytes an example", "times smaller", "build", *(f"scores: {kind}" for kind in kinds)]
    return (
        f"## Smaller stores\n\n{found['examples']:,} digits, {found['width']:,} features; times relative to float32, "
        "scores of so many queries from the page cache or the disk. What smaller stores do to scores is in [from a "
        "laptop to a cluster](scale.md).\n\n" + table(head, rows)
    )


SECTIONS: dict[str, Callable[[Found], str]] = {
    "fixed": fixed,
    "storage": storage,
    "scoring": scoring,
    "weights": weights,
    "banks": banks,
}
