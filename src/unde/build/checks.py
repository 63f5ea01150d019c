"""Checks of an index against what it should be: whole shards, the same model, task, groups and data."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unde.data import Rows
from unde.errors import UndeError
from unde.groups import Groups
from unde.index import manifest as mf
from unde.index.store import ShardError, read_shard
from unde.tasks.base import Task

LOOK_SECONDS = 5.0  # how long data is compared with what an index has seen; small data is compared whole


def shard_path(folder: Path, checkpoint: int, shard: int) -> Path:
    return folder / "shards" / f"c{checkpoint:02d}-{shard:06d}.safetensors"


def check_shards(folder: Path, manifest: mf.Manifest, verify: bool) -> None:
    """Every shard there, whole and at its place; one is in memory at a time."""
    count = len(manifest.shards)
    paths = [shard_path(folder, c, s) for c in range(manifest.terms) for s in range(count)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise ShardError(
            f"{folder} is not finished: {len(missing)} of {len(paths)} shards are missing "
            f"({', '.join(missing[:5])}{', …' if missing[5:] else ''}). "
            "Run the same Index.build again to finish it"
        )
    problems = []
    for path in paths:
        try:
            read_shard(path, manifest.id, verify)
        except ShardError as e:
            problems.append(str(e))
    if problems:
        more = f"; and {len(problems) - 5} more" if problems[5:] else ""
        raise ShardError(
            f"{'; '.join(problems[:5])}{more}. Run the same Index.build again to repair the index"
        )


def read_ids(folder: Path, manifest: mf.Manifest) -> list[Any] | None:
    if not manifest.ids:
        return None
    path = folder / "ids.json"
    try:
        ids = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        ids = []
    if mf.ids_fingerprint(ids) != manifest.ids:
        raise UndeError(f"{path} is missing or damaged: run the same Index.build again to repair it")
    return ids


def differences(
    manifest: mf.Manifest,
    model: nn.Module | None,
    models: list[str],
    task: Task | None,
    groups: Groups | None,
    rows: Rows | None,
) -> list[str]:
    """How an index differs from what is given to open it with, in words."""
    out = [] if model is None else _model_differences(manifest, model, models)
    if task is not None and mf.task_name(task) != manifest.task:
        out.append(f"the task ({manifest.task} there, {mf.task_name(task)} given)")
    if groups is not None:
        given = {k: list(v) for k, v in groups.members.items()}
        if list(given.items()) != list(manifest.groups.items()):
            out.append(f"the groups ({mf.brief(manifest.groups, given)})")
    if rows is not None and len(rows) != manifest.examples:
        out.append(f"the length of the training data ({manifest.examples} there, {len(rows)} given)")
    return out


def _model_differences(manifest: mf.Manifest, model: nn.Module, models: list[str]) -> list[str]:
    shapes = {n: list(p.shape) for n, p in model.named_parameters()}
    for u in manifest.units:
        here = shapes.get(u["name"])
        if here is None:
            return [f"the model (the one given has no parameter {u['name']!r})"]
        if here != u["shape"]:
            return [
                f"the model (parameter {u['name']!r} has shape {u['shape']} there, {here} in the one given)"
            ]
    if len(models) != len(manifest.models):
        return [f"the checkpoints ({len(manifest.models)} there, {len(models)} given; pass checkpoints=)"]
    if models != manifest.models:
        where = [c for c, (a, b) in enumerate(zip(models, manifest.models)) if a != b]
        which = "" if len(models) == 1 else f" of checkpoint {where[0]}"
        return [f"the model's weights{which} (same shapes, other values)"]
    return []


def changed_example(rows: Rows, where: Tensor, digests: Tensor) -> int | None:
    """One of the examples `where` that no longer has its digest; looks at as many as time allows."""
    deadline = time.monotonic() + LOOK_SECONDS
    for count, at in enumerate(_spread(len(where))):
        i = int(where[at])
        if to_signed(rows.digests([i])[0]) != int(digests[at]):
            return i
        if count >= mf.SAMPLED and time.monotonic() > deadline:
            break
    return None


def _spread(n: int) -> Iterator[int]:
    """0 … n − 1, each once, so that any first part of it is spread evenly over all."""
    step = max(1, round(n * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, n) > 1:
        step += 1
    return (i * step % n for i in range(n))


def length_now(rows: Rows) -> int:
    """How many examples the data has now, whatever it had when it was first looked at."""
    try:
        return len(Rows(rows.data, rows.collate))
    except UndeError:
        return 0


def to_signed(digest: str) -> int:
    value = int(digest, 16)
    return value - (1 << 64) if value >= 1 << 63 else value
