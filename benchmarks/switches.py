"""Whole builds and scorings with the switches of the package on, relative to each of them off: below 1 it saves time.

    python -m benchmarks run switches

A process reads the switches once, so every setting has a process of its own, which lives through all rounds; the
processes take turns. A build is `Index.build`, planning and writing included; a query is `index.score(query).top(10)`
of eight examples on the new index; scores are the best 10 of 20,000 random examples for 1,000 queries, files included.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.cases import CASES, SEED, rows_of
from benchmarks.machine import machine
from benchmarks.rounds import interleaved, ratio, timed
from benchmarks.scoring import WIDTH, scored, write_index
from unde import Index
from unde.methods import TracIn

ON, SWITCHES = "on", ("UNDE_ONEDNN",)
NAMES, TIMES, EXAMPLES, QUERIES, ROUNDS = ("gpt2", "resnet"), 4, 20_000, 1000, 9


def measure(quick: bool = False) -> dict[str, Any]:
    times, examples, rounds = (1, 500, 2) if quick else (TIMES, EXAMPLES, ROUNDS)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_index(Path(folder) / "random", examples, WIDTH, "float32")
        runs = {}
        for name in (ON, *SWITCHES):
            pool = stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
            with mock.patch.dict(os.environ, {s: "0" if s == name else "1" for s in SWITCHES}):
                pool.submit(torch.set_num_threads, torch.get_num_threads()).result()
            runs[name] = lambda pool=pool: pool.submit(operations, folder, times).result()
        seconds, _ = interleaved(runs, rounds, SEED, tell=lambda line: print(f"switches: {line}", flush=True))
    print(machine(), flush=True)
    parts = [key.removeprefix(f"{ON}, ") for key in seconds if key.startswith(f"{ON}, ")]
    on_to_off = {p: {s: ratio(seconds[f"{ON}, {p}"], seconds[f"{s}, {p}"]) for s in SWITCHES} for p in parts}
    return {
        "examples": examples,
        "times": times,
        "rounds": rounds,
        "on_to_off": on_to_off,
        "seconds": seconds,
    }


def operations(folder: str, times: int) -> dict[str, float]:
    """Seconds of each operation, in a process of one setting."""
    seconds = {}
    for name in NAMES:
        setup = CASES[name].setup()
        rows, method = rows_of(setup, times * CASES[name].examples), TracIn(projection="kron(16)")
        with tempfile.TemporaryDirectory(dir=folder) as place:
            begun = time.perf_counter()
            index = Index.build(setup.model, setup.task, rows, place, method=method, progress=False)
            seconds[f"build {name}"] = time.perf_counter() - begun
            begun = time.perf_counter()
            index.score([rows[i] for i in range(8)]).top(10)
            seconds[f"query {name}"] = time.perf_counter() - begun
    queries = torch.randn(QUERIES, WIDTH)
    seconds["scores"] = timed(lambda: scored(Path(folder) / "random", queries, 2**30).top(10))
    return seconds
