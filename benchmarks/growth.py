"""How costs grow with examples, groups, rank, sequence length and width: exponents fitted on logarithms.

    python -m benchmarks run growth

All sizes of an axis are timed in turns. An exponent is fitted to every round; the median is given with its interval.
Peak memory is that of a process of its own for each size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import unde
from benchmarks.cases import SEED, gpt2, resnet, rows_of
from benchmarks.peaks import peaks
from benchmarks.rounds import Run, interleaved, timed
from unde import Groups, Index, Setup, bench
from unde.bench import median_interval
from unde.methods import TracIn
from unde.tasks import Classification

QUERIES = 64
AXES = {
    "examples": (1_000, 2_000, 4_000, 8_000, 16_000),
    "groups": (4, 16, 64, 256),
    "rank": (4, 8, 16, 32, 64),
    "tokens": (32, 64, 128, 256, 512),
    "width": (64, 128, 256, 512),
}
PEAKS = {"examples": (1_000, 4_000, 16_000), "rank": (8, 16, 64), "tokens": (64, 128, 256, 512)}
ROUNDS = 6


def measure(quick: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, sizes in AXES.items():
        sizes = sizes[:: max(1, len(sizes) // 2)] if quick else sizes
        with tempfile.TemporaryDirectory() as folder:
            runs = MAKERS[name](sizes, Path(folder))
            tell = _quiet if quick else lambda line, name=name: print(f"growth, {name}: {line}", flush=True)
            seconds, _ = interleaved(runs, 3 if quick else ROUNDS, SEED, tell=tell)
        curves: dict[str, dict[int, list[float]]] = {}
        for key, values in seconds.items():
            size, _, curve = key.partition(", ")
            curves.setdefault(curve, {})[int(size)] = values
        if name == "rank":
            curves["over the frozen pass"] = _over(curves.pop("frozen"), curves["features"])
        found[name] = {curve: fitted(values) for curve, values in curves.items()}
    if not quick:
        jobs = [(f"benchmarks.growth:peak_{axis}", size) for axis, sizes in PEAKS.items() for size in sizes]
        bytes_of = dict(zip([(job[0].rpartition("_")[2], job[1]) for job in jobs], peaks(jobs)))
        for axis, sizes in PEAKS.items():
            found[axis]["peak memory"] = {
                "sizes": list(sizes),
                "bytes": [bytes_of[axis, size] for size in sizes],
                "exponent": round(slope(sizes, [bytes_of[axis, size] for size in sizes]), 3),
            }
    return found


def fitted(values: dict[int, list[float]]) -> dict[str, Any]:
    """Medians at every size, and the exponent."""
    sizes = sorted(values)
    rounds = np.array([values[size] for size in sizes])  # (sizes, rounds)
    slopes = [slope(sizes, column) for column in rounds.T]
    low, high = median_interval(slopes)
    return {
        "sizes": sizes,
        "seconds": [round(float(m), 6) for m in np.median(rounds, axis=1)],
        "exponent": round(float(np.median(slopes)), 3),
        "interval95": [round(low, 3), round(high, 3)],
    }


def slope(sizes: Sequence[float], values: Sequence[float] | np.ndarray) -> float:
    """The exponent p of values ∝ sizes^p, by least squares on logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    kept = np.maximum(np.asarray(values, dtype=float), 1e-9)  # differences may be lost in noise
    return float(np.polyfit(np.log(np.asarray(sizes, dtype=float)), np.log(kept), 1)[0])


def _over(frozen: dict[int, list[float]], features: dict[int, list[float]]) -> dict[int, list[float]]:
    return {size: [max(a - b, 1e-4) for a, b in zip(features[size], frozen[size])] for size in features}


def _quiet(line: str) -> None: ...


def network(layers: int, width: int) -> nn.Module:
    body = [step for _ in range(layers) for step in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(width, 10))


def plain_setup(layers: int, width: int, count: int) -> Setup:
    torch.manual_seed(SEED)
    data = (torch.randn(count, width), torch.randint(0, 10, (count,)))
    queries = (torch.randn(QUERIES, width), torch.randint(0, 10, (QUERIES,)))
    return Setup(network(layers, width), Classification(), data, eval_queries=queries)


def _index(setup: Setup, folder: Path, rank: int = 16) -> Index:
    return Index.build(
        setup.model, setup.task, setup.train_data, folder, method=TracIn(projection=f"kron({rank})"), progress=False
    )  # fmt: skip


def examples(sizes: Sequence[int], folder: Path) -> dict[str, Run]:
    """Three layers, 256 wide: features, the scores of 64 queries, and weights from group scores."""
    runs: dict[str, Run] = {}
    for size in sizes:
        setup = plain_setup(2, 256, size)
        index = _index(setup, folder / str(size))
        queries = index.features(setup.eval_queries)
        resolved = torch.rand(QUERIES, size, 16)

        def run(
            setup: Setup = setup,
            index: Index = index,
            queries: Any = queries,
            resolved: torch.Tensor = resolved,
        ) -> dict[str, float]:
            return {
                "features": bench.build(setup, setup.rows(setup.train_data), TracIn(projection="kron(16)")),
                "scores of 64 queries": timed(lambda: index.score(queries).total()),
                "by group": timed(lambda: index.score(queries).by_group()),
                "learning weights": timed(lambda: unde.learn_weights(resolved, k=50, weight_decay=0.1)),
            }

        runs[str(size)] = run
    return runs


def groups(sizes: Sequence[int], folder: Path) -> dict[str, Run]:
    """128 layers, 32 wide, 2,000 examples: group scores of 64 queries, and weights from them."""
    setup = plain_setup(128, 32, 2_000)
    index = _index(setup, folder / "index", rank=8)
    queries = index.features(setup.eval_queries)
    runs: dict[str, Run] = {}
    for size in sizes:
        made = Groups.consecutive(setup.model, size)
        resolved = torch.rand(QUERIES, 2_000, size)

        def run(made: Groups = made, resolved: torch.Tensor = resolved) -> dict[str, float]:
            return {
                "by group": timed(lambda: index.score(queries).regroup(made).by_group()),
                "learning weights": timed(lambda: unde.learn_weights(resolved, k=50, weight_decay=0.1)),
            }

        runs[str(size)] = run
    return runs


def rank(sizes: Sequence[int], folder: Path) -> dict[str, Run]:
    """ResNet-18 on 128 images."""
    torch.manual_seed(SEED)
    setup = resnet()
    rows = rows_of(setup, 128)
    runs: dict[str, Run] = {}
    for size in sizes:

        def run(size: int = size) -> dict[str, float]:
            settled: list[Any] = []
            method = TracIn(projection=f"kron({size})")
            took = bench.build(setup, rows, method, lambda index: settled.append(index.manifest.resolved))
            frozen = bench.passes(setup, rows, bench.frozen_pass, settled[0].pass_size)
            return {"features": took, "frozen": frozen}

        runs[str(size)] = run
    return runs


def _language(setups: dict[int, Setup]) -> dict[str, Run]:
    """8 sequences at rank 16, and a plain pass over them."""
    runs: dict[str, Run] = {}
    for size, setup in setups.items():
        rows = rows_of(setup, 8)

        def run(setup: Setup = setup, rows: Any = rows) -> dict[str, float]:
            return {
                "features": bench.build(setup, rows, TracIn(projection="kron(16)")),
                "plain pass": bench.passes(setup, rows, bench.plain_pass, 8),
            }

        runs[str(size)] = run
    return runs


def tokens(sizes: Sequence[int], folder: Path) -> dict[str, Run]:
    torch.manual_seed(SEED)
    return _language({size: gpt2(tokens=size) for size in sizes})


def width(sizes: Sequence[int], folder: Path) -> dict[str, Run]:
    torch.manual_seed(SEED)
    return _language({size: gpt2(tokens=128, width=size) for size in sizes})


MAKERS = {"examples": examples, "groups": groups, "rank": rank, "tokens": tokens, "width": width}


def peak_examples(size: int) -> Callable[[], Any]:
    setup = plain_setup(2, 256, size)
    return lambda: bench.build(setup, setup.rows(setup.train_data), TracIn(projection="kron(16)"))


def peak_rank(size: int) -> Callable[[], Any]:
    torch.manual_seed(SEED)
    setup = resnet()
    rows = rows_of(setup, 128)
    return lambda: bench.build(setup, rows, TracIn(projection=f"kron({size})"))


def peak_tokens(size: int) -> Callable[[], Any]:
    torch.manual_seed(SEED)
    setup = gpt2(tokens=size)
    rows = rows_of(setup, 8)
    return lambda: bench.build(setup, rows, TracIn(projection="kron(16)"))
