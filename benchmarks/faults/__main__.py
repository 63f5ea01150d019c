"""python -m benchmarks.faults: see the package."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from benchmarks.faults import damage, disks, inputs, kills, manifests
from benchmarks.faults.trial import OUTCOMES, Tally
from benchmarks.machine import machine
from unde.version import __version__

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "faults.json", ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


@dataclass(frozen=True)
class Size:
    kills: int = 100
    several: int = 4
    disks: int = 100
    damage: int = 20_000
    manifests: int = 400
    inputs: float = 1.0  # the share of them


SHORT = Size(kills=6, several=0, disks=12, damage=120, manifests=30, inputs=0.15)


def campaign(size: Size, seed: int, folder: Path, say: bool = True) -> Tally:
    """All categories, one after the other; each draws from a generator of its own."""
    tally = Tally()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # forks have one
    try:
        for name, run, count in (
            ("kills", kills.run, size.kills),
            ("several", kills.run_several, size.several),
            ("disks", disks.run, size.disks),
            ("damage", damage.run, size.damage),
            ("manifests", manifests.run, size.manifests),
            ("inputs", inputs.run, size.inputs),
        ):
            place, started = folder / name, time.monotonic()
            place.mkdir()
            if count:
                run(tally, place, random.Random(f"{seed} {name}"), count)  # ty: ignore[invalid-argument-type]
            if say:
                print(f"{name}: {time.monotonic() - started:.0f} s, {tally.bad} bad so far", file=sys.stderr)
    finally:
        torch.set_num_threads(threads)
    return tally


def table(counts: dict[str, dict[str, int]]) -> str:
    lines = [f"| | tried | {' | '.join(OUTCOMES)} |", "|---|" + "---:|" * (1 + len(OUTCOMES))]
    rows = [*counts.items(), ("all", {o: sum(c.get(o, 0) for c in counts.values()) for o in OUTCOMES})]
    for category, found in rows:
        cells = [sum(found.values()), *(found.get(outcome, 0) for outcome in OUTCOMES)]
        lines.append(f"| {category} | {' | '.join(f'{n:,}' for n in cells)} |")
    return "\n".join(lines)


def rendered(results: dict) -> str:
    told = (
        f"`python -m benchmarks.faults --seed {results['seed']}`, {results['date']}, unde {results['unde']}, torch "
        f"{results['torch']}, {results['cpu']}, {results['minutes']} minutes."
    )
    return f"{BEGIN}\n{table(results['counts'])}\n\n{told}\n{END}"


def render(page: Path, results: dict) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + rendered(results) + rest.partition(END)[2])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description="The fault campaign.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="seconds, and nothing is written")
    parser.add_argument(
        "--render", action="store_true", help="write the page from the results that are there"
    )
    given = parser.parse_args()
    if given.render:
        render(PAGE, json.loads(RESULTS.read_text()))
        return
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # syncs by the thousand wear out a disk
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        os.environ["XDG_STATE_HOME"] = folder  # not the key of whoever runs this
        tally = campaign(SHORT if given.short else Size(), given.seed, Path(folder))
    results = {
        "seed": given.seed,
        "date": date.today().isoformat(),
        "unde": __version__,
        "torch": torch.__version__,
        "cpu": machine()["processor"],
        "minutes": round((time.monotonic() - started) / 60, 1),
        "counts": {category: dict(count) for category, count in tally.counts.items()},
        "examples": tally.examples[:50],
    }
    print(f"{table(results['counts'])}\n\nseed {given.seed}, {results['cpu']}")
    for example in results["examples"]:
        print(f"- {example}")
    if not given.short:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        render(PAGE, results)
    raise SystemExit(1 if tally.bad else 0)


if __name__ == "__main__":
    main()
