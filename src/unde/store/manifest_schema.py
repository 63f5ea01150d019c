"""Check all counts and names in a manifest before they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unde.groups import Groups

MOST = 2**40  # examples, and columns of a feature
SHARDS = 10**6  # files: a look at each takes seconds
_KINDS: dict[type, tuple[str, ...]] = {
    str: ("store_dtype", "on_bad", "data", "ids", "matrices"),
    dict: ("method", "task", "groups", "resolved"),
    int: ("seed",),
    bool: ("factors",),
}
_TASK = {"settings": dict, "code": dict | None, "source": bool}  # custom tasks may have other fields


def check(content: Mapping[str, Any]) -> None:
    """Raise a ValueError that names a wrong field: a type, or a count too large to loop over."""
    for kind, names in _KINDS.items():
        for name in names:
            if type(content[name]) is not kind:
                raise ValueError(f"{name} is a {type(content[name]).__name__}")
    _check_task(content["task"])
    _check_units(content["units"])
    groups = {k: tuple(_list(f"group {k!r}", v, str)) for k, v in content["groups"].items()}
    Groups(groups).of([u["name"] for u in content["units"]])
    terms = len(_list("checkpoint_weights", content["checkpoint_weights"], float | int))
    if not terms or not all(math.isfinite(eta) and eta >= 0 for eta in content["checkpoint_weights"]):
        raise ValueError("checkpoint_weights are not finite numbers ≥ 0")
    models = len(_list("models", content["models"], str))
    if not models or terms % models:
        raise ValueError(f"{terms} checkpoint_weights for {models} models")
    _check_resolved(content["resolved"], _count("examples", content["examples"]), terms)


def _check_task(task: Mapping[str, Any]) -> None:
    kinds = {"name": str, **{name: kind for name, kind in _TASK.items() if name in task}}
    wrong = [name for name, kind in kinds.items() if not isinstance(task.get(name), kind)]
    if wrong:
        raise ValueError(f"the task has no right {wrong[0]!r}")


def _check_units(units: Any) -> None:
    if not _list("units", units, dict):
        raise ValueError("there are no units")
    for u in units:
        if not isinstance(u["name"], str):
            raise ValueError(f"a unit is called {u['name']!r}")
        for side in _list(f"the shape of {u['name']!r}", u["shape"], int):
            _count(f"the shape of {u['name']!r}", side)
        _count(f"the size of {u['name']!r}", u["size"])
        if u.get("rank", 0) != 0:
            _count(f"the rank of {u['name']!r}", u["rank"])
    _count("the width", sum(u["size"] for u in units))
    if len({u["name"] for u in units}) < len(units):
        raise ValueError("two units have one name")


def _check_resolved(resolved: Mapping[str, Any], examples: int, terms: int) -> None:
    size = _count("shard_size", resolved["shard_size"])
    _count("pass_size", resolved["pass_size"])
    for name, most in (("threads", 2**16), ("rows", MOST)):
        if resolved[name] is not None:
            _count(name, resolved[name], most)
    if -(-examples // size) * terms > SHARDS:
        raise ValueError(
            f"{examples:,} examples in shards of {size} under {terms} checkpoints are too many files"
        )
    if not isinstance(resolved.get("device"), str | None):
        raise ValueError("the device is no name")
    if type(resolved.get("per_checkpoint", False)) is not bool:
        raise ValueError("per_checkpoint is neither true nor false")
    coverage, directions = resolved["coverage"], resolved["directions"]
    if coverage is not None and len(_list("coverage", coverage, dict)) not in range(1, terms + 1):
        raise ValueError(f"{len(coverage)} coverages for {terms} checkpoints")
    if directions is not None:
        if len(_list("directions", directions, int | None)) != 2:
            raise ValueError("directions are not two numbers")
        _count("directions", directions[0])


def is_count(value: Any, most: int = MOST) -> bool:
    return type(value) is int and 1 <= value <= most


def _count(name: str, value: Any, most: int = MOST) -> int:
    if not is_count(value, most):
        raise ValueError(f"{name} is {str(value)[:40]}, expected a number from 1 to {most:,}")
    return value


def _list(name: str, value: Any, kind: Any) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(x, kind) and type(x) is not bool for x in value):
        raise ValueError(f"{name} is not a list of the right kind")
    return value
