"""Speed and memory of LoGRA and EKFAC on language models, as ratios to a plain training pass of the same round.

    python -m benchmarks run language

The GPT-2 and the Llama of benchmarks/cases.py. Timed in turns: the plain pass, the frozen pass, the builds (writing
included, planning not), and the second pass of EKFAC, which reads stored features and not the model. "none" is EKFAC
without projection. Peak memory is that of a process of its own for each pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from benchmarks.cases import CASES, SEED, rows_of
from benchmarks.features import pass_of
from benchmarks.peaks import peaks
from benchmarks.rounds import Run, interleaved, ratio, seconds_of
from unde import Index, Setup, bench
from unde.data import Rows
from unde.methods import EKFAC, LoGRA, Method

NAMES = ("gpt2", "llama")
METHODS: dict[str, Method] = {
    "LoGRA 16": LoGRA(projection="kron(16)"),
    "EKFAC 16": EKFAC(projection="kron(16)"),
    "LoGRA 64": LoGRA(projection="kron(64)"),
    "EKFAC 64": EKFAC(projection="kron(64)"),
    "EKFAC none": EKFAC(projection="none"),
}
ROUNDS = 6
SELDOM = {"EKFAC none": 3}  # rounds in which it runs: it takes ten times as long
SECOND = "second pass"


def measure(quick: bool = False) -> dict[str, Any]:
    return {name: one(name, quick) for name in NAMES}


def one(name: str, quick: bool) -> dict[str, Any]:
    case = CASES[name]
    setup = case.setup()
    rows = rows_of(setup, case.examples)
    methods = {m: METHODS[m] for m in list(METHODS)[:2]} if quick else METHODS
    settled: list[Any] = []
    bench.build(setup, rows, METHODS["LoGRA 16"], lambda index: settled.append(index.manifest.resolved))
    size = settled[0].pass_size
    runs: dict[str, Run] = {
        "plain": lambda: bench.passes(setup, rows, bench.plain_pass, case.batch),
        "frozen": lambda: bench.passes(setup, rows, bench.frozen_pass, size),
        **{m: _build(setup, rows, method, SELDOM.get(m, 10**6)) for m, method in methods.items()},
    }
    tell = (lambda line: None) if quick else lambda line: print(f"language, {name}: {line}", flush=True)
    seconds, _ = interleaved(runs, 3 if quick else ROUNDS, SEED, tell=tell)
    passes = {key: ratio(took, seconds["plain"]) for key, took in seconds.items() if key != "plain"}
    found = {
        "plain": seconds_of(seconds["plain"]),
        "examples": case.examples,
        "pass_size": size,
        "passes": passes,
    }
    if not quick:
        jobs = ["plain", *methods]
        told = peaks([("benchmarks.language:one_pass", name, job) for job in jobs])
        found["peak_bytes"] = dict(zip(jobs, told))
    return found


def _build(setup: Setup, rows: Rows, method: Method, rounds: int) -> Run:
    left = [1 + rounds]  # the first warms up

    def run() -> dict[str, float]:
        if left[0] == 0:
            return {"": math.nan, SECOND: math.nan}
        left[0] -= 1
        second: list[float] = []

        def use(index: Index) -> None:
            if isinstance(method, EKFAC):  # bases and corrected eigenvalues; the kernel is applied to queries
                begun = time.perf_counter()
                index._state.scorer.train_features(method)
                second.append(time.perf_counter() - begun)

        took = bench.build(setup, rows, method, use, memory="8GB")
        return {"": took, SECOND: second[0]} if second else {"": took}

    return run


def one_pass(name: str, what: str) -> Callable[[], float]:
    return pass_of(name, METHODS.get(what))
