"""What one more query costs on an open index, as a ratio to the plain forward and backward pass of that query.

    python benchmarks/queries.py                    # prints the table, writes benchmarks/results/queries.json
    python benchmarks/queries.py --case resnet --runs 30

The models of benchmarks/features.py. A hundred queries are asked one by one; each is timed from the call of
`index.score` to the scores of all training examples, and so is the product alone, with features at hand. Plain
passes of the same query are timed in between, so that noise of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from features import BATCH, gpt2, machine, resnet
from unde import Index
from unde.data import Rows
from unde.features import floor
from unde.methods import TRAK, LoGRA

RESULTS = Path(__file__).parent / "results" / "queries.json"
CASES = {"resnet": resnet, "gpt2": gpt2}
METHODS = {"TRAK": TRAK(projection="kron(16)"), "LoGRA": LoGRA(projection="kron(16)")}


def timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def measure(case: str, method: str, runs: int) -> dict[str, Any]:
    setup = CASES[case]()
    rows = Rows(setup.train_data, setup.task.collate)
    data = Rows([rows[i % len(rows)] for i in range(4 * BATCH[case])], setup.task.collate)
    seconds: dict[str, list[float]] = {"plain": [], "query": [], "product": []}
    with tempfile.TemporaryDirectory() as folder:
        index = Index.build(
            setup.model, setup.task, data, Path(folder) / "i", method=METHODS[method], progress=False
        )
        first = timed(lambda: index.score([rows[0]]).total())
        for i in range(runs):
            query = [rows[i % len(rows)]]
            seconds["plain"].append(
                timed(lambda q=query: floor.plain(setup.model, setup.task, [data.collate(q)]))
            )
            seconds["query"].append(timed(lambda q=query: index.score(q).total()))
            kept = index.features(query)
            seconds["product"].append(timed(lambda kept=kept: index.score(kept).total()))
    plain, query, product = (np.array(seconds[name]) for name in ("plain", "query", "product"))
    ratios = (query - product) / np.median(plain)
    medians = np.median(np.random.default_rng(0).choice(ratios, (2000, runs)), axis=1)
    return {
        "ratio": round(float(np.median(ratios)), 3),
        "interval95": [round(float(np.quantile(medians, q)), 3) for q in (0.025, 0.975)],
        "plain_ms": round(1e3 * float(np.median(plain)), 2),
        "product_ms": round(1e3 * float(np.median(product)), 2),
        "first_query_ms": round(1e3 * first, 1),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--runs", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    found = {}
    for case in [options.case] if options.case else CASES:
        for method in METHODS:
            found[f"{case}, {method}"] = told = measure(case, method, options.runs)
            low, high = told["interval95"]
            print(
                f"{case:8} {method:6} one more query costs {told['ratio']:.2f} [{low:.2f}, {high:.2f}] of a plain pass "
                f"({told['plain_ms']:.1f} ms), the product {told['product_ms']:.1f} ms; the first "
                f"{told['first_query_ms']:.0f} ms"
            )
    if not options.case:
        RESULTS.write_text(json.dumps({"machine": machine(), "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
