"""What one more query costs on an open index, as a ratio to the plain forward and backward pass of that query.

    python -m benchmarks run queries

Queries are asked one by one; each is timed from the call of `index.score` to the scores of all training examples, and
so is the product alone, with features at hand. Plain passes of the same query are timed in between.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import CASES, SEED, rows_of
from benchmarks.rounds import estimate, interleaved, timed
from unde import Index, bench
from unde.methods import TRAK, LoGRA

NAMES = ("resnet", "vit", "gpt2", "llama")
METHODS = {"TRAK": TRAK(projection="kron(16)"), "LoGRA": LoGRA(projection="kron(16)")}
GOAL = 1.3


def measure(quick: bool = False) -> dict[str, Any]:
    names = ("resnet", "gpt2") if quick else NAMES
    return {
        f"{name}, {method}": one(name, method, 15 if quick else 60) for name in names for method in METHODS
    }


def one(name: str, method: str, rounds: int) -> dict[str, Any]:
    case = CASES[name]
    setup = case.setup()
    rows = rows_of(setup, 4 * case.batch)
    with tempfile.TemporaryDirectory() as folder:
        index = Index.build(
            setup.model, setup.task, rows, Path(folder) / "i", method=METHODS[method], progress=False
        )
        asked = [-1]

        def run() -> dict[str, float]:
            asked[0] += 1
            query = [rows[asked[0] % len(rows)]]
            plain = timed(lambda: bench.plain_pass(setup.model, setup.task, [rows.collate(query)]))
            whole = timed(lambda: index.score(query).total())
            kept = index.features(query)
            return {"plain": plain, "query": whole, "product": timed(lambda: index.score(kept).total())}

        first = timed(lambda: index.score([rows[0]]).total())
        seconds, _ = interleaved({"": run}, rounds, SEED)
    plain, query, product = (np.array(seconds[f", {key}"]) for key in ("plain", "query", "product"))
    return {
        **estimate((query - product) / plain),
        "goal": GOAL,
        "plain_ms": round(1e3 * float(np.median(plain)), 2),
        "product_ms": round(1e3 * float(np.median(product)), 2),
        "first_query_ms": round(1e3 * first, 1),
        "rounds": rounds,
    }
