"""What the precisions of `store_dtype` cost: bytes of an example, and time to build and to score.

    python -m benchmarks run storage                # about three minutes

The network and the digits of benchmarks/digits.py. Indexes of one precision after the other are built, and scored, in
turns: noise of the machine hits all alike, and times are ratios to float32. Scores are made in little memory, so that
shards are read each time: from the page cache, or from the disk (pages are given back before).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import digits
from benchmarks.machine import drop_cache
from benchmarks.rounds import interleaved, ratio, timed
from unde import Index
from unde.methods import TracIn
from unde.store.codec import CODECS

STORES = tuple(CODECS)
METHOD = TracIn(projection="kron(48)")
MEMORY = "32MB"  # for scoring: blocks are not kept


def measure(quick: bool = False) -> dict[str, Any]:
    """{"examples", "width", "stores": {store: {"bytes", "times smaller", "build", "score": {…}}}}; times are ratios to
    float32."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            digits.prepare(Path(folder))
            setup = digits.make(folder, 2000 if quick else 20_000)
            return speed(setup, Path(folder) / "speed", 1 if quick else 3)
    finally:
        torch.set_num_threads(before)


def size(index: Index) -> float:
    return sum(p.stat().st_size for p in (index.folder / "shards").iterdir()) / index.manifest.examples


def speed(setup: Any, folder: Path, runs: int) -> dict[str, Any]:
    made: dict[str, Index] = {}

    def build(dtype: str) -> None:
        options: dict[str, Any] = {"method": METHOD, "store_dtype": dtype, "progress": False}
        place = folder / f"{len(list(folder.iterdir()))}-{dtype}"
        made[dtype] = Index.build(setup.model, setup.task, setup.train_data, place, **options)

    folder.mkdir()
    builds, _ = interleaved(
        {dtype: lambda dtype=dtype: timed(lambda: build(dtype)) for dtype in STORES}, runs
    )
    given = {"model": setup.model, "task": setup.task, "memory": MEMORY}
    opened = {dtype: Index.open(index.folder, **given) for dtype, index in made.items()}
    x, y = setup.eval_queries
    asked = {n: made["float32"].features((x[:n], y[:n])).features for n in (1, digits.QUERIES)}

    def score(dtype: str, queries: int, cold: bool) -> float:
        scores = opened[dtype]._state.scorer.scores(METHOD, asked[queries], [""] * queries)
        if cold:
            drop_cache(opened[dtype].folder)
        return timed(scores.total)

    kinds = {f"{n}, {'disk' if cold else 'cache'}": (n, cold) for n in asked for cold in (False, True)}
    cases = {f"{dtype}: {kind}": (dtype, *given) for dtype in STORES for kind, given in kinds.items()}
    runs_of = {name: lambda case=case: score(*case) for name, case in cases.items()}
    times, _ = interleaved(runs_of, 4 * runs)
    m = made["float32"].manifest
    stores = {
        dtype: {
            "bytes": size(made[dtype]),
            "times smaller": size(made["float32"]) / size(made[dtype]),
            "build": ratio(builds[dtype], builds["float32"])["ratio"],
            "score": {
                kind: ratio(times[f"{dtype}: {kind}"], times[f"float32: {kind}"])["ratio"] for kind in kinds
            },
        }
        for dtype in STORES
    }
    return {"examples": m.examples, "width": m.width, "stores": stores}
