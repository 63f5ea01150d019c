"""What a build costs that does not grow with its examples.

    python -m benchmarks run fixed

The GPT-2 and the ResNet-18 of benchmarks/cases.py. Indexes of several lengths are built in turn, with passes of one
size. The fixed cost is the intercept of the line through their times, the median over rounds. `direct` is the time of
a build without that of its features, from the log of the build. Each model and rank has its own process.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.cases import CASES, rows_of
from benchmarks.rounds import timed
from unde import Index
from unde.data import Rows
from unde.methods import TracIn

COUNTS = {"gpt2": (8, 16, 24, 32), "resnet": (32, 64, 128, 256)}
GOALS = {"gpt2": 0.3, "resnet": 0.2}  # seconds
RANKS = (16, 64)


def measure(quick: bool = False) -> dict[str, Any]:
    rounds = 3 if quick else 5
    rows = []
    for case in COUNTS:
        for rank in RANKS[:1] if quick else RANKS:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                row = process.submit(measure_case, case, rank, rounds).result()
            rows.append({"case": case, "rank": rank, "now": row})
    return {"goals": GOALS, "rows": rows}


def measure_case(case: str, rank: int, rounds: int) -> dict[str, Any]:
    counts, setup = COUNTS[case], CASES[case].setup()
    rows = rows_of(setup, max(counts))
    method = TracIn(projection=f"kron({rank})")

    def build(count: int) -> tuple[float, float]:
        part = Rows([rows[i] for i in range(count)], rows.collate)
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"method": method, "progress": False}
            whole = timed(lambda: Index.build(setup.model, setup.task, part, Path(folder) / "i", **options))
            log = (Path(folder) / "i" / "log.jsonl").read_text().splitlines()
        return whole, whole - sum(json.loads(line)["seconds"] for line in log)

    with mock.patch("unde.gradients.feature_pass.MOST", CASES[case].batch):
        first, _ = build(counts[0])
        times = np.array([[build(count) for count in counts] for _ in range(rounds)])  # (rounds, counts, 2)
    lines = np.array([np.polyfit(counts, row, 1) for row in times[:, :, 0]])  # slope, intercept
    samples = np.random.default_rng(0).choice(lines[:, 1], (2000, rounds))
    interval = np.quantile(np.median(samples, axis=1), (0.025, 0.975))
    return {
        "intercept": round(float(np.median(lines[:, 1])), 3),
        "interval95": [round(float(bound), 3) for bound in interval],
        "direct": round(float(np.median(times[:, :, 1])), 3),
        "per_example_ms": round(1e3 * float(np.median(lines[:, 0])), 2),
        "first_build": round(first, 3),
    }
