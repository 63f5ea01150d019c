"""Seconds and bytes of weight learning: the fixed-point solver beside Algorithm 1, and learning without queries.

    python -m benchmarks run weights

Contributions of 500 queries, 5,000 training examples and 256 groups are in memory (2.6 GB); Algorithm 1 takes its 10
epochs of one step for each query. Both solvers maximise the same objective, without decay, whose exact value at both
results is told; times are medians of turns. `candidates` are some of those that `unde.evaluate.search` lets Algorithm 1
learn together. `streamed` is the same problem, read in blocks within a budget of 512 MB. Learning without queries finds
its strength, learns and reports among 100,000 training examples of 256 groups, of 8 features each, within 2 GB; copies
are features with noise, so that no model is run.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import forget_peak, status
from unde import learn_weights
from unde.groups import Groups
from unde.methods import TracIn
from unde.scoring import ArrayFeatures, GroupScores, from_arrays
from unde.weights import retrieval
from unde.weights.adamw import adamw
from unde.weights.contributions import Contributions
from unde.weights.fixed_point import fixed_point
from unde.weights.learn import EPOCHS, LEARNING_RATE
from unde.weights.objective import WeightProblem

SIZES = {"full": (500, 5_000, 256), "quick": (100, 2_000, 128)}
COPIES = {"full": (100_000, 256), "quick": (5_000, 64)}
GB = 2**30


def contributions(queries: int, examples: int, groups: int, seed: int = 0) -> Tensor:
    """(Q, N, M): one example in fifty has influence; groups differ in strength and size and share some noise."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    strength, size = torch.rand(groups, generator=generator) ** 3, normal(groups).exp()
    run = examples + 8 * queries  # noise of the next query is that of this one, shifted by 8
    noise = normal(run, groups) + 0.3 * normal(run, 8) @ normal(8, groups)
    made = torch.empty(queries, examples, groups)
    for q, part in enumerate(made):
        part.copy_(noise[8 * q : 8 * q + examples])
        hit = torch.randperm(examples, generator=generator)[: max(1, examples // 50)]
        influence = 3 * normal(len(hit), 1).abs() ** 1.5
        part[hit] += influence * strength * (1 + 0.3 * normal(len(hit), groups))
        part *= size
    return made


def solvers(values: Tensor, ks: tuple[int, ...], turns: int) -> list[dict[str, Any]]:
    """Both, in turns, with the exact objective at what they found, as a multiple of the unweighted one."""
    names = [str(j) for j in range(values.shape[2])]
    data = Contributions(from_arrays(values, groups=names, memory=16 * GB))
    rows = []
    for k in ks:
        problem = WeightProblem(data, torch.arange(len(values)), k, "top-k")
        unweighted = float(problem.values(torch.ones(data.groups)).mean())
        runs: dict[str, Callable[[], Any]] = {
            "fixed-point": lambda p=problem: fixed_point(p, 0.0),
            "adamw": lambda p=problem: adamw([p], [0.0], epochs=EPOCHS, lr=LEARNING_RATE)[0],
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        told: dict[str, Any] = {}
        for _ in range(turns):
            for name, run in runs.items():
                taken, fit, beside = measured(run)
                seconds[name].append(taken)
                reached = float(problem.values(fit.weights.float()).mean()) / unweighted
                told[name] = {"objective": reached, "bytes_beside_contributions": beside}
                if name == "fixed-point":
                    told[name] |= {"looks": len(fit.curve), "converged": fit.converged}
        both: dict[str, dict[str, Any]] = {
            name: {"seconds": median(seconds[name]), "all_seconds": seconds[name], **told[name]}
            for name in runs
        }
        ratio = both["adamw"]["seconds"] / both["fixed-point"]["seconds"]
        relative = both["fixed-point"]["objective"] / both["adamw"]["objective"]
        rows.append(
            {"k": k, "shape": list(values.shape), **both, "times_faster": ratio, "objective_ratio": relative}
        )
    return rows


def default(values: Tensor) -> dict[str, Any]:
    """`learn_weights(scores)` as it is: Algorithm 1 of the paper."""
    scores = from_arrays(values, memory=16 * GB)
    seconds, weights, beside = measured(lambda: learn_weights(scores))
    return {"seconds": seconds, "bytes_beside_contributions": beside, "k": weights.provenance["k"]}


def candidates(values: Tensor) -> dict[str, Any]:
    data = Contributions(from_arrays(values, memory=16 * GB))
    everything = torch.arange(len(values))
    asked = [(k, decay) for k in (5, 10, 50, 100) for decay in (0.1, 0.5)]

    def run() -> None:
        problems = [WeightProblem(data, everything, k, "top-k") for k, _ in asked]
        adamw(problems, [decay for _, decay in asked], epochs=EPOCHS, lr=LEARNING_RATE)

    seconds, _, beside = measured(run)
    return {"candidates": len(asked), "seconds": seconds, "bytes_beside_contributions": beside}


def streamed(values: Tensor, memory: int) -> dict[str, Any]:
    """The fixed point and an epoch of Algorithm 1 within `memory`, of contributions that do not fit."""
    made = {"memory": memory}
    for name in ("fixed-point", "adamw"):

        def run(name: str = name) -> None:
            data = Contributions(from_arrays(values, memory=memory))
            problem = WeightProblem(data, torch.arange(len(values)), 10, "top-k")
            _ = (
                fixed_point(problem, 0.1)
                if name == "fixed-point"
                else adamw([problem], [0.0], epochs=1, lr=LEARNING_RATE)
            )

        seconds, _, beside = measured(run)
        made[name] = {"seconds": seconds, "bytes": beside}
    return made


def without_queries(examples: int, groups: int, memory: int, width: int = 8) -> dict[str, Any]:
    """What `index.learn_weights()` does once copies have features: search, learning, reporting."""
    generator = torch.Generator().manual_seed(0)
    spread = (4 * torch.rand(groups, generator=generator) ** 3).repeat_interleave(width)
    features = torch.randn(examples, groups * width, generator=generator)
    content, drawn = torch.arange(examples), torch.randperm(examples, generator=generator)
    parts = drawn[:348].split([48, 200, 100])

    def copies(which: Tensor, noise: float) -> retrieval.Copies:
        random = torch.randn(len(which), groups * width, generator=generator)
        asked = features[which] + 20 * noise * spread * random
        return retrieval.Copies(_scores(features, asked, groups, width, memory // 2), which, content)

    def run() -> dict[str, Any]:
        search, learn, report = parts
        found = retrieval.search_strength(
            lambda s: float(copies(search, s).retrieved().float().mean()), 0.05, 1.0
        )
        after = copies(learn, found.strength).learn_top()
        told = copies(report, found.strength)
        shares = [float(told.retrieved(w).float().mean()) for w in (None, after)]
        return {"strength": found.strength, "found": shares}

    seconds, told, beside = measured(run)
    return {
        "examples": examples,
        "groups": groups,
        "seconds": seconds,
        "memory": memory,
        "bytes": beside,
        **told,
    }


def _scores(train: Tensor, queries: Tensor, groups: int, width: int, memory: int) -> GroupScores:
    units = [f"p{j}" for j in range(groups)]
    features = ArrayFeatures(train, dict.fromkeys(units, width), block_rows=2048)
    names = Groups({unit: (unit,) for unit in units})
    return GroupScores(features, queries[None], TracIn(), names, [""] * len(queries), {}, memory)


def measured(run: Callable[[], Any]) -> tuple[float, Any, int]:
    """Seconds, what came out, and the most bytes at once beyond those before, as Linux tells them; those that malloc
    keeps go back to the system first, and would not be seen otherwise."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    forget_peak()
    before, begun = status("VmRSS"), time.perf_counter()
    result = run()
    return time.perf_counter() - begun, result, max(0, status("VmHWM") - before)


def measure(quick: bool = False) -> dict[str, Any]:
    size = "quick" if quick else "full"
    values = contributions(*SIZES[size])
    found = {
        "contributions": "synthetic",
        "solvers": solvers(values, (10,), turns=1 if quick else 3),
        "default": default(values),
        "candidates": candidates(values),
        "streamed": streamed(values, 2**26 if quick else 2**29),
    }
    del values
    return found | {"without_queries": without_queries(*COPIES[size], 2**28 if quick else 2 * GB)}
