"""Which benchmarks there are, and where what they found is kept: benchmarks/results/NAME.json."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.shared.paths import write_json

from benchmarks.cases import CASES, SEED
from benchmarks.machine import provenance
from unde.errors import unknown

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MODULES = (
    "language", "queries", "growth", "fixed", "storage", "scoring", "weights", "banks", "explorer", "devices",
)  # fmt: skip
CHECKED = ("features.resnet", "features.vit", "features.gpt2", "queries", "fixed")  # by `make bench`, in turn


@dataclass(frozen=True)
class Benchmark:
    """`measure(quick)` gives plain JSON. Ratios in it that may be compared are {"ratio": …, "interval95": […]}, smaller
    is better unless it also says {"better": "higher"}."""

    name: str
    about: str
    measure: Callable[[bool], dict[str, Any]]

    @property
    def stored(self) -> Path:
        return RESULTS / f"{self.name}.json"


def benchmarks() -> dict[str, Benchmark]:
    """Those that are here, by name, in the order in which they are run."""
    made = [
        Benchmark(
            f"features.{name}", f"the feature pass and peers: {case.title}", _of_module("features", name)
        )
        for name, case in CASES.items()
    ]
    made += [Benchmark(name, _about(HERE / f"{name}.py"), _of_module(name)) for name in MODULES]
    return {b.name: b for b in made}


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """`all`, single ones, or all of a family: `features` are those of every model."""
    there = benchmarks()
    found: dict[str, Benchmark] = {}
    for name in names:
        family = [b for b in there.values() if name in ("all", b.name, b.name.partition(".")[0])]
        if not family:
            raise unknown("benchmark", name, [*there, "features", "all"])
        found |= {b.name: b for b in family}
    return list(found.values())


def run(benchmark: Benchmark, quick: bool = False) -> dict[str, Any]:
    about, begun = provenance(SEED, quick), time.perf_counter()
    found = benchmark.measure(quick)
    return {"provenance": {**about, "took": round(time.perf_counter() - begun, 1)}, "found": found}


def keep(benchmark: Benchmark, result: dict[str, Any]) -> None:
    """Whole or not at all: what was found, and where it is from beside it."""
    write_json(benchmark.stored, {"provenance": result["provenance"], **result["found"]})


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    about = found.pop("provenance", None)
    if about is None and "machine" in found:  # kept by the benchmark itself
        about = {
            "machine": found["machine"],
            "versions": {"torch": found.get("torch", "")},
            "begun": "earlier",
        }
    return None if about is None else {"provenance": about, "found": found}


def _of_module(name: str, *given: str) -> Callable[[bool], dict[str, Any]]:
    return lambda quick: importlib.import_module(f"benchmarks.{name}").measure(*given, quick=quick)


def _about(path: Path) -> str:
    """The first sentence of a file, which is read and not run."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(doc.split("\n\n")[0].split()).rstrip(".")
