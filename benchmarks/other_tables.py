"""Sections of docs/speed.md about benchmarks that are files of their own, each from what that file found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from experiments.pages.book import table

Found = dict[str, Any]
NAMES = {"resnet": "ResNet-18", "vit": "ViT", "gpt2": "GPT-2", "llama": "Llama"}


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
        copied = f"totals; writing as many bytes takes {e['copying']['ratio']:.2f}"
        rows.append([what, copied, _ratio(e["array"]), _seconds(e["array"]["seconds"])])
    for e in found.get("stores", ()):
        if e["store"] != "float32":
            what = f"{e['store']}, {e['queries']:,} queries, from the {e['from']}"
            rows.append([what, "float32", _ratio(e), _seconds(e["seconds"])])
    for e in found.get("million", ()):
        what = f"top 100 of {e['examples']:,} × {e['features']:,} in int8 for {e['queries']} queries, from the disk"
        rows.append([what, "reading the files", _ratio(e), _seconds(e["seconds"])])
    head = ["", "relative to", "ratio", "time"]
    return "## Scoring\n\nScores relative to what nothing can go below:\n\n" + table(head, rows)


def _ratio(e: Found) -> str:
    spread = e.get("interval95") or e.get("range")
    return f"{e['ratio']:.2f} [{spread[0]:.2f}, {spread[1]:.2f}]" if spread else f"{e['ratio']:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


SECTIONS: dict[str, Callable[[Found], str]] = {"fixed": fixed, "scoring": scoring}


def section(name: str, found: Found) -> str:
    """Of a benchmark by its name; one that nobody wrote a table for shows what it prints (`told` or `shown`)."""
    if name in SECTIONS:
        return SECTIONS[name](found)
    module = importlib.import_module(f"benchmarks.{name}")
    says = getattr(module, "told", None) or getattr(module, "shown", None)
    return f"## {name.capitalize()}\n\n```text\n{says(found).strip()}\n```" if says else ""
