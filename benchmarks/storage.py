"""What a smaller store costs and saves: bytes, time to build and to score, and how far scores are off those of float32.

    python -m benchmarks.storage                # prints the tables
    python -m benchmarks.storage --examples 4000 --runs 3

The network and the digits of benchmarks/digits.py. Indexes of one precision after the other are built, and scored, in
turns: noise of the machine hits all alike, and times are ratios to float32. Scores are made in little memory, so that
shards are read each time: from the page cache, or from the disk (pages are given back before).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks import digits
from unde import Index, methods
from unde.store.codec import CODECS

METHODS = {
    "tracin": methods.TracIn(projection="kron(48)"),
    "logra": methods.LoGRA(projection="kron(48)"),
    "ekfac": methods.EKFAC(projection="kron(48)"),
    "trak": methods.TRAK(projection="kron(32)"),
}
MEMORY = "32MB"  # for scoring: blocks are not kept


def timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def dropped(folder: Path) -> None:
    """The files of an index are not in the page cache any more."""
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sizes(made: dict[str, Index]) -> dict[str, float]:
    each = {}
    for dtype, index in made.items():
        m = index.manifest
        each[dtype] = sum(p.stat().st_size for p in (index.folder / "shards").iterdir()) / m.examples
    return each


def speed(setup: Any, folder: Path, runs: int) -> None:
    builds: dict[str, list[float]] = {dtype: [] for dtype in CODECS}
    made: dict[str, Index] = {}
    for run in range(runs):
        for dtype in CODECS:
            begun = time.perf_counter()
            made[dtype] = built(setup, folder / f"{run}-{dtype}", "tracin", dtype)
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
                    scores = index._opened.scorer.scores(METHODS["tracin"], some, [""] * queries)
                    if cold:
                        dropped(index.folder)
                    times.setdefault((dtype, queries, cold), []).append(timed(scores.total))
    width = made["float32"].manifest.width
    print(f"{len(setup.train_data)} examples, {width} features; times are medians, as ratios to float32\n")
    print("| | bytes an example | build | score 1, cached | from disk | score 100, cached | from disk |")
    print("|---|---|---|---|---|---|---|")
    for dtype, each in sizes(made).items():
        ratios = [np.median(np.array(builds[dtype]) / builds["float32"])]
        for queries in (1, digits.QUERIES):
            for cold in (False, True):
                ratio = np.array(times[dtype, queries, cold]) / times["float32", queries, cold]
                ratios.append(np.median(ratio))
        print(f"| {dtype} | {each:,.0f} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |")


def built(setup: Any, folder: Path, method: str, dtype: str) -> Index:
    return Index.build(
        setup.model,
        setup.task,
        setup.train_data,
        folder,
        method=METHODS[method],
        store_dtype=dtype,
        progress=False,
    )


def errors(setup: Any, folder: Path) -> None:
    print(
        "\n| | method | error of scores, relative to their size | Spearman, mean and least | top 10 shared |"
    )
    print("|---|---|---|---|---|")
    for method in METHODS:
        true = None
        for dtype in CODECS:
            scores = built(setup, folder / f"{method}-{dtype}", method, dtype).score(setup.eval_queries)
            found = scores.total().double()
            if true is None:
                true = found
                continue
            off = float(((found - true).norm(dim=1) / true.norm(dim=1)).median())
            ranks = [spearmanr(a, b).statistic for a, b in zip(found, true)]
            best = zip(found.topk(10).indices.tolist(), true.topk(10).indices.tolist())
            shared = np.mean([len(set(a) & set(b)) / 10 for a, b in best])
            print(
                f"| {dtype} | {method} | {off:.2g} | {np.mean(ranks):.5f}, {min(ranks):.5f} | {shared:.1%} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        digits.prepare(folder)
        speed(digits.make(temporary, given.examples), folder / "speed", given.runs)
        errors(digits.make(temporary, min(given.examples, 4000)), folder / "errors")


if __name__ == "__main__":
    main()
