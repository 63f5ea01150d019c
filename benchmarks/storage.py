"""What the precisions of `store_dtype` cost: bytes of an example, and time to build and to score.

    python -m benchmarks run storage                # about three minutes

The network and the digits of benchmarks/digits.py. Indexes of one precision after the other are built, and scored, in
turns: noise of the machine hits all alike, and times are ratios to float32. Scores are made in little memory, so that
shards are read each time: from the page cache, or from the disk (pages are given back before).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import digits
from benchmarks.machine import drop_cache
from benchmarks.rounds import timed
from unde import Index
from unde.methods import TracIn
from unde.store.codec import CODECS

STORES = (*CODECS, "factored(1)", "factored(4)")
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
    """Bytes of an example, all files of shards."""
    return sum(p.stat().st_size for p in (index.folder / "shards").iterdir()) / index.manifest.examples


def speed(setup: Any, folder: Path, runs: int) -> dict[str, Any]:
    builds: dict[str, list[float]] = {dtype: [] for dtype in STORES}
    made: dict[str, Index] = {}
    for run in range(runs):
        for dtype in STORES:
            begun = time.perf_counter()
            made[dtype] = Index.build(
                setup.model, setup.task, setup.train_data, folder / f"{run}-{dtype}", method=METHOD,
                store_dtype=dtype, progress=False,
            )  # fmt: skip
            builds[dtype].append(time.perf_counter() - begun)
    opened = {
        dtype: Index.open(index.folder, model=setup.model, task=setup.task, memory=MEMORY)
        for dtype, index in made.items()
    }
    x, y = setup.eval_queries
    asked = {n: made["float32"].features((x[:n], y[:n])).features for n in (1, digits.QUERIES)}
    times: dict[tuple[str, int, bool], list[float]] = {}
    for _ in range(4 * runs):
        for queries, some in asked.items():
            for cold in (False, True):
                for dtype, index in opened.items():
                    scores = index._state.scorer.scores(METHOD, some, [""] * queries)
                    if cold:
                        drop_cache(index.folder)
                    times.setdefault((dtype, queries, cold), []).append(timed(scores.total))
    m = made["float32"].manifest
    stores = {}
    for dtype, index in made.items():
        score = {
            f"{queries}, {'disk' if cold else 'cache'}": _ratio(
                times[dtype, queries, cold], times["float32", queries, cold]
            )
            for queries in asked
            for cold in (False, True)
        }
        stores[dtype] = {
            "bytes": size(index),
            "times smaller": size(made["float32"]) / size(index),
            "build": _ratio(builds[dtype], builds["float32"]),
            "score": score,
        }
    return {"examples": m.examples, "width": m.width, "stores": stores}


def _ratio(times: list[float], to: list[float]) -> float:
    """The median over turns."""
    return float(np.median(np.array(times) / to))
