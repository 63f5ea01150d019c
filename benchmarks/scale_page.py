"""The tables and the figure of docs/scale.md, from results/scale.json. No number is copied by hand.

<!-- scale: memory -->
… whatever stands here is replaced …
<!-- end -->
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from experiments.pages import book
from experiments.pages.book import table
from experiments.pages.figures import lines

from unde.console import duration, size
from unde.data import parse_bytes

DOCS = Path(__file__).parent.parent / "docs"
PAGE, FIGURE = (
    DOCS / "scale.md",
    DOCS / "scale.svg",
)  # docs/figures is cleared of what experiments do not draw
Found = dict[str, Any]


def write(found: Found) -> None:
    PAGE.write_text(filled(PAGE.read_text(), found))
    drawn = figure(found)
    if drawn is not None:
        FIGURE.write_text(drawn)


def filled(page: str, found: Found) -> str:
    return book.filled(page, "scale", lambda name: TABLES[name](found))


def memory(found: Found) -> str | None:
    rows = [
        [
            f"{r['examples']:,}",
            r["budget"],
            r["allocator"],
            size(beyond(r)),
            size(r["before"]),
            *(
                duration(r["seconds"][name], exact=True)
                for name in ("build", "open", "kernel", "query features", "scoring")
            ),
            size(r["bytes_on_disk"]),
        ]
        for r in sorted(found["memory"], key=lambda r: (r["budget"], r["allocator"], r["examples"]))
    ]
    head = (
        "examples | budget | allocator | peak beyond | what was there before | build | open | kernel | "
        "features of 100 queries | top 10 of each | on disk"
    )
    return table(head, rows) if rows else None


def beyond(row: Found) -> int:
    """Bytes that an index took at its highest, as the system noted it, beside what the process had before."""
    return max(row["peak"], row.get("high_water", 0)) - row["before"]


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


TABLES: dict[str, Callable[[Found], str | None]] = {"memory": memory, "engines": engines}
