"""Builds of whole and factored gradients beside a plain pass and `kron(16)`, and questions beside reading, in processor
seconds with one thread.

    python -m benchmarks.whole_gradients [gpt2 resnet] [--examples 128] [--queries 16] [--features "factored(8)" none]

A plain pass is one forward and backward pass of the model over the examples, in batches of eight. Builds are
`Index.build` for EKFAC, preparation included: the sample of whitening is at most 4,096 examples, so its share falls in
larger indexes. Scores of one query take about as long as reading the index.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CASES, SEED, rows_of
from benchmarks.machine import machine
from unde import Index

FEATURES = ("kron(16)", "factored(1)", "factored(4)", "factored(8)", "none")


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    found = run()
    return time.process_time() - begun, found


def measure(name: str, examples: int, queries: int, kinds: Sequence[str]) -> None:
    torch.manual_seed(SEED)
    setup = CASES[name].make()
    rows = rows_of(setup, examples)

    def plain() -> None:
        for start in range(0, examples, 8):
            batch = rows.batch(range(start, min(start + 8, examples)))
            setup.task.loss(setup.model, batch).sum().backward()
            setup.model.zero_grad()

    plain()  # the first is slower
    once, _ = seconds(plain)
    print(f"{name}: {examples} examples, plain pass {once:.1f} s", flush=True)
    base = None
    for features in kinds:
        with tempfile.TemporaryDirectory() as folder:
            build, index = seconds(
                lambda features=features, folder=folder: Index.build(
                    setup.model, setup.task, rows, Path(folder) / "i", method="ekfac", projection=features,
                    store_dtype="auto" if features.startswith("factored") else "int8", disk="100GB", memory="4GB",
                    progress=False,
                )
            )  # fmt: skip
            base = base or build
            line = f"{build:.1f} s, {build / once:.1f} plain passes, {build / base:.1f} × {kinds[0]}"
            if queries:
                one, some = (index.features(rows.subset(range(n))) for n in (1, queries))
                index.score(one).total()  # fits the kernel
                read, _ = seconds(lambda index=index, one=one: index.score(one).total())
                ask, _ = seconds(lambda index=index, some=some: index.score(some).total())
                line += f"; scores of {queries} queries {ask:.1f} s, of one {read:.1f} s"
            print(f"  {features:12} {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["gpt2", "resnet"])
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--queries", type=int, default=16)
    parser.add_argument("--features", nargs="+", default=FEATURES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    for name in options.names:
        measure(name, options.examples, options.queries, options.features)


if __name__ == "__main__":
    main()
