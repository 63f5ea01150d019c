"""A million examples on one machine, within a budget of memory; and what engines cost beside a serial build.

    python -m benchmarks.scale                      # all of it, then the tables and the figure of docs/scale.md
    python -m benchmarks.scale memory --examples 10000 30000
    python -m benchmarks.scale engines --examples 200000
    python -m benchmarks.scale render               # docs/scale.md and its figure, from results/scale.json

Every row is a process of its own, which does what a user would: `Index.build`, `Index.open`, features of 100 queries,
`index.score` (which fits the kernel), `top(10)`. The system notes the highest resident memory of each stage; what the
process had with the model, the data and a small index built is told apart. Rows are kept as soon as they are there, and
a row that is there is not measured again unless --again is given. Engines are measured in turn, a round of all of them
after the other, so that noise of the machine hits all alike. Everything runs on one thread, and all seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from experiments.shared.paths import write_json

from benchmarks import scale_page
from benchmarks.digits import make, prepare
from benchmarks.machine import forget_peak, machine, status
from unde import Index
from unde.setup import Recipe

RESULTS = Path(__file__).parent / "results" / "scale.json"
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
BUDGETS = ("512MB", "2GB")  # the second for the largest size alone
METHOD = {"method": "ekfac", "projection": "kron(16)", "store_dtype": "float16"}
ENGINES = ("serial", "processes:1", "processes:2", "array:0/1", "ray:1", "ray:2")
RUNS = 5  # rounds of engines
MINUTE = 1_000_000  # examples whose build takes one core about a minute
KEPT = 10  # best examples of a query
ALLOCATORS = {"usual": {}, "exact": {"MALLOC_MMAP_THRESHOLD_": str(2**18)}}
PARTS = ("memory", "engines")
Row = dict[str, Any]


# --- in the process that is measured --------------------------------------------------------------------


def million(folder: str, examples: int, budget: str) -> Row:
    """Build, open and ask an index: seconds and peak memory of each stage."""
    setup = make(folder, examples)
    options: dict[str, Any] = METHOD | {"memory": budget, "progress": False}
    with tempfile.TemporaryDirectory(dir=folder) as small:  # libraries are loaded, their work space is there
        index = Index.build(setup.model, setup.task, make(folder, 600).train_data, small, **options)
        index.score(setup.eval_queries).top(KEPT)
    before, seconds, peaks = status("VmRSS"), {}, {}

    def stage(name: str, run: Callable[[], Any]) -> Any:
        forget_peak()
        begun = time.monotonic()
        result = run()
        seconds[name], peaks[name] = round(time.monotonic() - begun, 3), status("VmHWM")
        return result

    data = setup.train_data
    with tempfile.TemporaryDirectory(dir=folder) as place:
        stage("build", lambda: Index.build(setup.model, setup.task, data, place, **options))
        given: dict[str, Any] = {
            "model": setup.model,
            "task": setup.task,
            "train_data": data,
            "memory": budget,
        }
        index = stage("open", lambda: Index.open(place, **given))
        queries = stage("query features", lambda: index.features(setup.eval_queries))
        scores = stage("kernel", lambda: index.score(queries))
        top = stage("scoring", lambda: scores.top(KEPT))
        right = (data.labels[top.indices % len(data.labels)].T == setup.eval_queries[1]).T
        return {
            "seconds": seconds,
            "before": before,
            "peak": max(peaks.values()),
            "beyond": {name: max(0, peak - before) for name, peak in peaks.items()},
            "features": index.manifest.width,
            "shards": len(index.manifest.shards),
            "pass_size": index.manifest.resolved.pass_size,
            "bytes_on_disk": sum(f.stat().st_size for f in Path(place).rglob("*") if f.is_file()),
            "same_label": round(right.float().mean().item(), 4),
        }


def build(folder: str, examples: int, engine: str) -> Row:
    """One build under an engine: seconds in all, and until the first shard was there."""
    setup = make(folder, examples)
    recipe = Recipe("benchmarks.digits:make", {"folder": folder, "examples": examples})
    options: dict[str, Any] = METHOD | {"executor": engine, "recipe": recipe, "progress": False}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        begun = time.time()
        Index.build(setup.model, setup.task, setup.train_data, place, **options)
        seconds = time.time() - begun
        shards = [f.stat().st_mtime for f in (Path(place) / "shards").iterdir()]
    return {"seconds": seconds, "first_shard": min(shards) - begun, "shards": len(shards)}


# --- from outside ---------------------------------------------------------------------------------------


def measured(folder: str, examples: int, budget: str, allocator: str) -> Row:
    row = {"examples": examples, "budget": budget, "allocator": allocator}
    return row | _started("million", folder, str(examples), budget, environment=ALLOCATORS[allocator])


def _started(*arguments: str, environment: Mapping[str, str] | None = None) -> Row:
    """What a process of this file with one thread finds."""
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.scale", "--inside", *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | one | dict(environment or {})
    )
    return json.loads(done.stdout.splitlines()[-1])


def memory(folder: str, sizes: list[int], budgets: list[str], again: bool) -> None:
    """All sizes under the first budget and both allocators; the largest under the others, and the usual one."""
    cases = [(n, budgets[0], allocator) for allocator in ALLOCATORS for n in sizes]
    cases += [(sizes[-1], budget, "usual") for budget in budgets[1:]]
    for case in cases:
        key = ("examples", "budget", "allocator")
        if again or not _there("memory", **dict(zip(key, case))):
            row = measured(folder, *case)
            keep("memory", row, key)
            beyond = max(row["beyond"].values())
            times = ", ".join(f"{name} {t:.1f} s" for name, t in row["seconds"].items())
            print(
                f"{case[0]:,} examples, {case[1]}, {case[2]} allocator: {beyond / 1e6:.0f} MB beyond "
                f"{row['before'] / 1e6:.0f} MB, {times}",
                flush=True,
            )


def engines(folder: str, examples: int, again: bool) -> None:
    for run in range(RUNS):
        for name in ENGINES:
            if again or not _there("engines", engine=name, examples=examples, run=run):
                row = {"engine": name, "examples": examples, "run": run}
                row |= _started("build", folder, str(examples), name)
                keep("engines", row, ("engine", "examples", "run"))
                print(f"run {run}, {name}: {row['seconds']:.1f} s", flush=True)


# --- results --------------------------------------------------------------------------------------------


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"memory": [], "engines": []}


def keep(part: str, row: Row, key: tuple[str, ...]) -> None:
    """Into the file at once, in place of an earlier one; whoever reads it sees all of it or what was there before."""
    found = read()
    there = {tuple(r[k] for k in key): r for r in found[part]}
    there[tuple(row[k] for k in key)] = row | {
        "seed": 0,
        "load": round(os.getloadavg()[1], 1),  # of others too: times are as good as the machine was quiet
        "torch": torch.__version__,
        "machine": machine(),
    }
    found[part] = [there[k] for k in sorted(there)]
    write_json(RESULTS, found)


def _there(part: str, **asked: Any) -> bool:
    return any(all(row[k] == v for k, v in asked.items()) for row in read()[part])


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        _inside(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["all", *PARTS, "render"], default="all")
    parser.add_argument("--examples", type=int, nargs="+", help="sizes of indexes; of the engines', one")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--work", type=Path, help="a folder on a real disk (default: a temporary one)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        if options.what != "render":
            prepare(Path(folder))
        if options.what in ("all", "memory"):
            memory(folder, options.examples or list(SIZES), list(BUDGETS), options.again)
        if options.what in ("all", "engines"):
            size = (options.examples or [MINUTE])[0]
            engines(folder, size, options.again)
    scale_page.write(read())


def _inside(what: str, folder: str, examples: str, how: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps({"million": million, "build": build}[what](folder, int(examples), how)), flush=True)


if __name__ == "__main__":
    main()
