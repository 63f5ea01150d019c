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
from benchmarks.rounds import interleaved, timed
from unde import Groups, Index, Setup, bench
from unde.bench import median_interval
from unde.data import Rows
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
            runs = {}
            for size in sizes:
                parts = curves_of(name, size, Path(folder) / ("index" if name == "groups" else str(size)))
                runs[str(size)] = lambda parts=parts: {curve: run() for curve, run in parts.items()}
            tell = (
                (lambda line: None)
                if quick
                else lambda line, name=name: print(f"growth, {name}: {line}", flush=True)
            )
            seconds, _ = interleaved(runs, 3 if quick else ROUNDS, SEED, tell=tell)
        curves: dict[str, dict[int, list[float]]] = {}
        for key, values in seconds.items():
            size, _, curve = key.partition(", ")
            curves.setdefault(curve, {})[int(size)] = values
        if name == "rank":
            frozen, features = curves.pop("frozen"), curves["features"]
            over = {
                size: [max(a - b, 1e-4) for a, b in zip(features[size], frozen[size])] for size in features
            }
            curves["over the frozen pass"] = over
        found[name] = {curve: fitted(values) for curve, values in curves.items()}
    if not quick:
        jobs = [("benchmarks.growth:peak", axis, size) for axis, sizes in PEAKS.items() for size in sizes]
        bytes_of = dict(zip([(axis, size) for _, axis, size in jobs], peaks(jobs)))
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


def network(layers: int, width: int) -> nn.Module:
    body = [step for _ in range(layers) for step in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(width, 10))


def plain_setup(layers: int, width: int, count: int) -> Setup:
    torch.manual_seed(SEED)
    data = (torch.randn(count, width), torch.randint(0, 10, (count,)))
    queries = (torch.randn(QUERIES, width), torch.randint(0, 10, (QUERIES,)))
    return Setup(network(layers, width), Classification(), data, eval_queries=queries)


# axis → a setup of that size, how many examples (None: all it has), rank
SETUPS: dict[str, Callable[[int], tuple[Setup, int | None, int]]] = {
    "examples": lambda size: (plain_setup(2, 256, size), None, 16),
    "groups": lambda size: (plain_setup(128, 32, 2_000), None, 8),
    "rank": lambda size: (resnet(), 128, size),
    "tokens": lambda size: (gpt2(tokens=size), 8, 16),
    "width": lambda size: (gpt2(tokens=128, width=size), 8, 16),
}


def prepare(axis: str, size: int) -> tuple[Setup, Rows, TracIn]:
    torch.manual_seed(SEED)
    setup, count, rank = SETUPS[axis](size)
    rows = setup.rows(setup.train_data) if count is None else rows_of(setup, count)
    return setup, rows, TracIn(projection=f"kron({rank})")


def curves_of(axis: str, size: int, folder: Path) -> dict[str, Callable[[], float]]:
    """What is timed at one size, each giving its seconds."""
    setup, rows, method = prepare(axis, size)
    resolved: list[Any] = []
    features = {
        "features": lambda: bench.build(setup, rows, method, lambda i: resolved.append(i.manifest.resolved))
    }
    if axis == "rank":
        return features | {
            "frozen": lambda: bench.passes(setup, rows, bench.frozen_pass, resolved[-1].pass_size)
        }
    if axis in ("tokens", "width"):
        return features | {"plain pass": lambda: bench.passes(setup, rows, bench.plain_pass, 8)}
    index = Index.build(setup.model, setup.task, setup.train_data, folder, method=method, progress=False)
    queries = index.features(setup.eval_queries)
    groups = Groups.consecutive(setup.model, size) if axis == "groups" else index.groups
    values = torch.rand(QUERIES, len(rows), size if axis == "groups" else 16)
    grouped = {
        "by group": lambda: timed(lambda: index.score(queries).regroup(groups).by_group()),
        "learning weights": lambda: timed(lambda: unde.learn_weights(values, k=50, weight_decay=0.1)),
    }
    if axis == "groups":
        return grouped
    return features | {"scores of 64 queries": lambda: timed(lambda: index.score(queries).total())} | grouped


def peak(axis: str, size: int) -> Callable[[], Any]:
    setup, rows, method = prepare(axis, size)
    return lambda: bench.build(setup, rows, method)
