"""The tables and the figure of docs/scale.md, from results/scale.json. No number is copied by hand.

<!-- scale: memory -->
… whatever stands here is replaced …
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from experiments.pages.book import table
from experiments.pages.figures import lines

from unde.console import duration, size
from unde.data import parse_bytes
from unde.plan.show import flops

DOCS = Path(__file__).parent.parent / "docs"
PAGE, FIGURE = (
    DOCS / "scale.md",
    DOCS / "scale.svg",
)  # docs/figures is cleared of what experiments do not draw
_MARKED = re.compile(r"^(<!-- scale: (?P<name>\w+) -->\n).*?^(<!-- end -->)", re.S | re.M)
Found = dict[str, Any]


def write(found: Found) -> None:
    PAGE.write_text(filled(PAGE.read_text(), found))
    drawn = figure(found)
    if drawn is not None:
        FIGURE.write_text(drawn)


def filled(page: str, found: Found) -> str:
    """The page with every marked table that there are results for."""

    def one(match: re.Match[str]) -> str:
        made = TABLES[match["name"]](found)
        return match[0] if made is None else f"{match[1]}{made}\n{match[3]}"

    return _MARKED.sub(one, page)


def memory(found: Found) -> str | None:
    rows = [
        [
            f"{r['examples']:,}",
            r["budget"],
            r["allocator"],
            size(beyond(r)),
            size(r["before"]),
            *(_time(r["seconds"][name]) for name in ("build", "open", "kernel", "query features", "scoring")),
            size(r["bytes_on_disk"]),
        ]
        for r in sorted(found["memory"], key=lambda r: (r["budget"], r["allocator"], r["examples"]))
    ]
    head = [
        "examples",
        "budget",
        "allocator",
        "peak beyond",
        "what was there before",
        "build",
        "open",
        "kernel",
    ]
    return table([*head, "features of 100 queries", "top 10 of each", "on disk"], rows) if rows else None


def beyond(row: Found) -> int:
    """Bytes that an index took at its highest, as the system noted it, beside what the process had before."""
    return max(row["peak"], row["high_water"]) - row["before"]


def engines(found: Found) -> str | None:
    """Medians over rounds of ratios to the serial build of the same round."""
    rounds: dict[tuple[int, int], dict[str, Found]] = {}
    for r in found["engines"]:
        rounds.setdefault((r["examples"], r["run"]), {})[r["engine"]] = r
    whole = [by for by in rounds.values() if "serial" in by]
    names = sorted({name for by in whole for name in by}, key=lambda name: (name != "serial", name))
    rows = []
    for name in names:
        pairs = [(by[name], by["serial"]) for by in whole if name in by]
        starts = [a["first_shard"] - b["first_shard"] for a, b in pairs]
        ratio = median(a["seconds"] / b["seconds"] for a, b in pairs)
        bare = median((a["seconds"] - start) / b["seconds"] for (a, b), start in zip(pairs, starts))
        own = name == "serial"
        rows.append(
            [
                f"`{name}`",
                f"{pairs[0][0]['examples']:,}",
                str(len(pairs)),
                f"{median(a['seconds'] for a, _ in pairs):.1f} s",
                f"{ratio:.3f}",
                "–" if own else f"{median(starts):.1f} s",
                "–" if own else f"{bare:.3f}",
            ]
        )
    head = ["engine", "examples", "runs", "build", "of serial", "start-up", "of serial, without start-up"]
    return table(head, rows) if rows else None


def planned(found: Found) -> str | None:
    plan = found.get("plan")
    if plan is None:
        return None
    rows = []
    for count, w in plan["workers"].items():
        each, alone = w["each"], [s for s in w["stages"] if s["alone"]]
        rates = w["rates"]
        waits = sum(
            s["model_flops"] / rates["flops"]
            + s["flops"] / rates["cpu_flops"]
            + (s["reads"] + s["writes"]) / rates["disk"]
            for s in alone
        )
        kernel = [e for name, e in each.items() if name.startswith("kernel")]
        rows.append(
            [
                count,
                f"{each['features']['jobs']:,} of {next(s['jobs'] for s in w['stages'] if s['name'] == 'features'):,}",
                f"{each['features']['passes']:,}",
                size(each["features"]["writes"]),
                _hours(each["features"]["hours"]),
                _hours(sum(e["hours"] for e in kernel)),
                _hours(waits / 3600),
                _hours(w["hours"][count]),
            ]
        )
    head = ["GPUs", "shards of each", "passes of each", "each writes", "features", "rounds of the kernel"]
    return table([*head, "one process", "in all"], rows)


def reduction(found: Found) -> str | None:
    plan = found.get("plan")
    if plan is None:
        return None
    w = next(iter(plan["workers"].values()))
    rows = [
        [r["name"], str(r["jobs"]), size(r["partial"] // r["jobs"]), size(r["partial"])] for r in w["rounds"]
    ]
    rows.append(["what they are merged into", "", "", size(w["merged"])])
    return table(["round", "jobs", "a partial file", "all"], rows)


def rate(found: Found) -> str | None:
    plan = found.get("plan")
    if plan is None:
        return None
    r, w = plan["rate"], next(iter(plan["workers"].values()))
    rows = [
        ["features, in all", flops(plan["flops"]["features"]), "computed: the plan"],
        ["on disk, in all", size(sum(plan["disk"].values())), "computed: the plan"],
        ["peak memory of a worker", size(plan["peak_memory"]), "computed: the plan, weights in bfloat16"],
        ["peak of a GPU", f"{flops(r['peak'])}/s", f"given: {r['sources']['peak']}"],
        ["share that a plain pass reaches", f"{r['share']:.0%}", f"assumed: {r['sources']['share']}"],
        [
            "what features reach of that",
            f"{r['operations']:.2f} of the operations in {r['seconds']:.2f} of the time: {r['reached']:.2f}",
            f"measured: {r['sources']['reached']}",
        ],
        ["a GPU in passes of features", f"{flops(r['flops'])}/s", "computed: the product of the three"],
        [
            "a processor, for the kernel",
            f"{flops(w['rates']['cpu_flops'])}/s",
            "measured here, one thread, float64",
        ],
        ["disk", f"{size(w['rates']['disk'])}/s for each worker", "assumed"],
    ]
    return table(["", "", "where it comes from"], rows)


def enough(found: Found) -> str | None:
    plan = found.get("plan")
    if plan is None:
        return None
    w = next(iter(plan["workers"].values()))
    return f"From {w['enough']:,} workers on twice as many would save less than a tenth."


def figure(found: Found) -> str | None:
    """Peaks of stages against the number of examples, under the budget that there are most sizes of."""
    rows = sorted(found["memory"], key=lambda r: r["examples"])
    budgets = [r["budget"] for r in rows]
    budget = max(set(budgets), key=budgets.count, default=None)
    panels, sizes = {}, sorted({r["examples"] for r in rows if r["budget"] == budget})
    for allocator in ("exact", "usual"):
        series = [r for r in rows if (r["budget"], r["allocator"]) == (budget, allocator)]
        if len(sizes) > 1 and [r["examples"] for r in series] == sizes:
            panels[f"memory={budget!r}, {allocator} allocator"] = {
                **{
                    stage: [r["beyond"][stage] / 1e6 for r in series]
                    for stage in ("build", "kernel", "scoring")
                },
                "budget": [parse_bytes(str(budget)) / 1e6] * len(series),
            }
    title = "Peak memory beyond that of the process with model and data, MB"
    return lines(panels, [f"{n:,}" for n in sizes], title=title, x_label="examples") if panels else None


def _time(seconds: float) -> str:
    return duration(seconds, exact=True)


def _hours(hours: float) -> str:
    return duration(3600 * hours, exact=True)


TABLES: dict[str, Callable[[Found], str | None]] = {
    "memory": memory,
    "engines": engines,
    "planned": planned,
    "reduction": reduction,
    "rate": rate,
    "enough": enough,
}
