"""What the package costs, measured.

    python -m benchmarks list
    python -m benchmarks run all                  # or NAME…; minutes each, writes benchmarks/results/NAME.json
    python -m benchmarks run all --resume         # leaves out what was measured on this processor in the last 12 hours
    python -m benchmarks run features.gpt2 --quick     # a few rounds without peers, printed and not kept
    python -m benchmarks render                   # docs/speed.md and the tables of other pages, from the results
    python -m benchmarks check                    # quick forms against the results; says what got worse

Nothing else should run meanwhile. Threads are those of torch: OMP_NUM_THREADS=2 for two.
"""

from __future__ import annotations

import argparse
import calendar
import json
import sys
import time
import traceback
from typing import Any

from benchmarks import registry
from benchmarks.compare import Change, compare, ratios
from benchmarks.machine import machine, same_processor
from unde.errors import UndeError

FRESH = 12 * 3600.0  # seconds for which --resume takes a result for done
TIME = 150.0  # seconds after which `check` begins no further benchmark


def listed() -> None:
    for benchmark in registry.benchmarks().values():
        result = registry.load(benchmark.name)
        when = result["provenance"]["begun"] if result else "not measured"
        print(f"{benchmark.name:18} {when:18} {benchmark.about}")


def run(names: list[str], quick: bool, resume: bool) -> int:
    failed = []
    for benchmark in registry.chosen(names):
        if resume and _fresh(registry.load(benchmark.name)):
            print(f"{benchmark.name}: measured already", flush=True)
            continue
        print(f"{benchmark.name}: {benchmark.about}", flush=True)
        try:
            result = registry.run(benchmark, quick)
        except Exception:  # the others are measured all the same
            traceback.print_exc()
            failed.append(benchmark.name)
            continue
        if quick:
            print(json.dumps(result, indent=1))
        else:
            registry.keep(benchmark, result)
        for name, found in ratios(result["found"]):
            print(f"  {name}: {found}")
        print(f"{benchmark.name}: {result['provenance']['took']:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _fresh(result: dict[str, Any] | None) -> bool:
    if result is None or "took" not in result["provenance"]:
        return False
    made = calendar.timegm(time.strptime(result["provenance"]["begun"], "%Y-%m-%d %H:%M"))
    return time.time() - made < FRESH and same_processor(result["provenance"]["machine"], machine())


def check(names: list[str]) -> int:
    """0 if no ratio got worse, else 1."""
    begun, here, left_out = time.monotonic(), machine(), []
    worse: list[Change] = []
    others: set[str] = set()
    count = 0
    for benchmark in registry.chosen(names) if names else _checked():
        stored = registry.load(benchmark.name)
        if stored is None or (not names and time.monotonic() - begun > TIME):
            left_out.append(
                f"{benchmark.name} ({'no result is stored' if stored is None else 'no time left'})"
            )
            continue
        if not same_processor(stored["provenance"]["machine"], here):
            others.add(_told(stored["provenance"]["machine"]))
        changes = compare(stored["found"], registry.run(benchmark, quick=True)["found"])
        count += len(changes)
        suspects = [c for c in changes if c.worse]
        if suspects:  # noise does not come back
            again = {
                c.name: c for c in compare(stored["found"], registry.run(benchmark, quick=True)["found"])
            }
            worse += [again[c.name] for c in suspects if c.name in again and again[c.name].worse]
        for change in changes:
            if change.better or change.worse:
                print(f"{benchmark.name}: {change}")
        print(f"{benchmark.name}: {len(changes)} ratios compared", flush=True)
    for name in left_out:
        print(f"left out: {name}")
    for other in sorted(others):
        print(
            f"warning: results are of {other}, this is {_told(here)}: ratios may differ for that reason alone"
        )
    if worse:
        print(f"\n{len(worse)} of {count} ratios got worse, twice in a row:")
        for change in worse:
            print(f"  {change}")
        return 1
    print(f"no ratio got worse ({count} compared, {time.monotonic() - begun:.0f} s)")
    return 0


def _checked() -> list[registry.Benchmark]:
    there = registry.benchmarks()
    return [there[name] for name in registry.CHECKED if name in there]


def _told(found: dict[str, Any]) -> str:
    return f"{found['processor']} with {found['instructions']}, {found['threads']} threads"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what there is, and when it was measured")
    running = commands.add_parser("run", help="measure, and keep what was found")
    running.add_argument("names", nargs="+", metavar="all|NAME")
    running.add_argument("--quick", action="store_true", help="few rounds, no peers; printed and not kept")
    running.add_argument(
        "--resume", action="store_true", help="not what was measured here in the last 12 hours"
    )
    commands.add_parser("render", help="write docs/speed.md and tables of other pages")
    checking = commands.add_parser("check", help="compare quick forms with what is kept")
    checking.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            listed()
        elif options.command == "run":
            return run(options.names, options.quick, options.resume)
        elif options.command == "check":
            return check(options.names)
        else:
            from benchmarks import speed_page

            for path in speed_page.write():
                print(f"wrote {path}")
    except UndeError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
