"""Whether a manifest could be that of an index: every count and name in it, before anything is made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unde.groups import Groups

MOST = 2**40  # examples, and columns of a feature
SHARDS = 10**6  # files: a look at each takes seconds


def check(found: Mapping[str, Any]) -> None:
    """Raises a ValueError that says what cannot be right; types alone are not enough, as counts are looped over."""
    for name, kind in _KINDS.items():
        if not isinstance(found[name], kind) or isinstance(found[name], bool) is not (kind is bool):
            raise ValueError(f"{name} is a {type(found[name]).__name__}")
    _task(found["task"])
    settled = found["settled"]
    examples = _count("examples", found["examples"])
    size = _count("shard_size", settled["shard_size"])
    _count("pass_size", settled["pass_size"])
    for name, most in (("threads", 2**16), ("rows", MOST)):
        if settled[name] is not None:
            _count(name, settled[name], most)
    terms = len(_list("checkpoint_weights", found["checkpoint_weights"], float | int))
    if not terms or not all(math.isfinite(eta) and eta >= 0 for eta in found["checkpoint_weights"]):
        raise ValueError("checkpoint_weights are not finite numbers ≥ 0")
    models = len(_list("models", found["models"], str))
    if not models or terms % models:
        raise ValueError(f"{terms} checkpoint_weights for {models} models")
    if -(-examples // size) * terms > SHARDS:
        raise ValueError(
            f"{examples:,} examples in shards of {size} under {terms} checkpoints are too many files"
        )
    _units(found["units"])
    groups = {name: tuple(_list(f"group {name!r}", params, str)) for name, params in found["groups"].items()}
    Groups(groups).of([u["name"] for u in found["units"]])
    _coverage(settled["coverage"], terms)
    directions = settled["directions"]
    if directions is not None:
        if len(_list("directions", directions, int | None)) != 2:
            raise ValueError("directions are not two numbers")
        _count("directions", directions[0])


_KINDS: dict[str, type] = {
    "method": dict,
    "task": dict,
    "store_dtype": str,
    "seed": int,
    "on_bad": str,
    "groups": dict,
    "data": str,
    "ids": str,
    "factors": bool,
    "matrices": str,
    "settled": dict,
}


def _task(task: Mapping[str, Any]) -> None:
    """What a task of one's own says about itself may be less, or more."""
    if not isinstance(task.get("name"), str):
        raise ValueError("the task has no right 'name'")
    kinds = {"settings": dict, "code": dict | None, "source": bool}
    wrong = [name for name, kind in kinds.items() if name in task and not isinstance(task[name], kind)]
    if wrong:
        raise ValueError(f"the task has no right {wrong[0]!r}")


def _units(units: Any) -> None:
    if not _list("units", units, dict):
        raise ValueError("there are no units")
    for u in units:
        if not isinstance(u["name"], str):
            raise ValueError(f"a unit is called {u['name']!r}")
        for side in _list(f"the shape of {u['name']!r}", u["shape"], int):
            _count(f"the shape of {u['name']!r}", side)
        _count(f"the size of {u['name']!r}", u["size"])
    _count("the width", sum(u["size"] for u in units))
    if len({u["name"] for u in units}) < len(units):
        raise ValueError("two units have one name")


def _coverage(coverage: Any, terms: int) -> None:
    if coverage is not None and len(_list("coverage", coverage, dict)) not in range(1, terms + 1):
        raise ValueError(f"{len(coverage)} coverages for {terms} checkpoints")


def _count(name: str, value: Any, most: int = MOST) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}, expected a number from 1 to {most:,}")
    return value


def _list(name: str, value: Any, kind: Any) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(x, kind) and type(x) is not bool for x in value):
        raise ValueError(f"{name} is not a list of the right kind")
    return value
