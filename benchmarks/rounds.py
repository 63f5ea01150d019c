"""Things that are timed in turns, so that noise of the machine hits all alike, and what is made of their seconds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unde.bench import median_interval

Seconds = dict[str, list[float]]  # of every round, by name
Run = Callable[
    [], "float | Mapping[str, float] | None"
]  # seconds it tells, by name of a part, or None: to be timed


class Failed(Exception):
    """It cannot be run here; says why in one line."""


def timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def interleaved(
    runs: Mapping[str, Run],
    rounds: int,
    seed: int = 0,
    warm: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[Seconds, dict[str, str]]:
    """Seconds of each run in every round, and why some failed: these are left out from then on.

    Every round has an order of its own, drawn with the seed. The first `warm` rounds are not kept.
    """
    draw, seconds, failed = random.Random(seed), {}, {}
    for number in range(warm + rounds):
        order = [name for name in runs if name not in failed]
        draw.shuffle(order)
        for name in order:
            begun = time.perf_counter()
            try:
                told = runs[name]()
            except Failed as e:
                failed[name] = str(e)
                for key in [k for k in seconds if k == name or k.startswith(f"{name}, ")]:
                    del seconds[key]
                tell(f"{name}: {e}")
                continue
            if told is None:
                told = time.perf_counter() - begun
            if number < warm:
                tell(f"{name}: ready after {time.perf_counter() - begun:.1f} s")
                continue
            parts = told if isinstance(told, Mapping) else {"": told}
            for part, value in parts.items():
                seconds.setdefault(f"{name}, {part}" if part else name, []).append(float(value))
        if number >= warm:
            tell(f"round {number - warm + 1} of {rounds}")
    return seconds, failed


def ratio(of: list[float] | np.ndarray, to: list[float] | np.ndarray) -> dict[str, Any]:
    """The median of the ratios of each round, with a 95 % interval."""
    return estimate(np.asarray(of) / np.asarray(to))


def estimate(values: np.ndarray) -> dict[str, Any]:
    """Rounds in which something was not run are NaN, and do not count."""
    values = values[np.isfinite(values)]
    low, high = median_interval(values)
    return {"ratio": round(float(np.median(values)), 4), "interval95": [round(low, 4), round(high, 4)]}


def seconds_of(values: list[float] | np.ndarray) -> dict[str, Any]:
    found = estimate(np.asarray(values))
    return {"seconds": found["ratio"], "interval95": found["interval95"]}
