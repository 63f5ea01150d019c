"""Has the code of a task changed what it computes? Features of a few examples, kept with an index, tell."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unde import console
from unde.checkpoints import loaded
from unde.data import evenly, to_device
from unde.gradients.coverage import TOLERANCE, CoverageTrial, decide
from unde.gradients.feature_pass import FeaturePass, resized
from unde.index.build_context import Context, checkpoint_of, step_of
from unde.index.compare import task_differences
from unde.store import layout
from unde.store.files import append_line
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import ShardError, read_shard, write_shard
from unde.tasks.identity import same_but_code

PROBED = 2  # examples


def changed_task(context: Context, identity: dict[str, Any]) -> list[str]:
    """How the task that is given differs from that of the index, in words; other code that computes the same does
    not, and is noted."""
    there = context.manifest.task
    differ = task_differences(there, identity, context.given.task)
    if not differ or not same_but_code(there, identity):
        return differ
    other = changed_by_code(context)
    if other is None:
        console.note(
            f"the code of {there['name']} is not what it was when {context.folder} was begun, but gives the same "
            "features: going on"
        )
        return []
    return [f"{d}: {other}" for d in differ]


def probed(context: Context, where: list[int]) -> Tensor:
    """The features of a few examples, under the first checkpoint."""
    given, rows = context.given, context.given.rows
    with loaded(given.model, checkpoint_of(given.checkpoints, 0)):
        task = step_of(resized(given.task, context.manifest.settled.rows), context.method, 0)
        what = replace(context.measurement, factors=None)
        with FeaturePass(given.model, task, what, context.coverage(0)) as run:
            features, _ = run.collect(to_device(rows.batch(where), run.collect.device), context.drawn(where))
    return features.float().cpu()


def restore_probe(context: Context) -> None:
    """The very same, found in the way of the first."""
    given = context.given
    with loaded(given.model, checkpoint_of(given.checkpoints, 0)):
        what = context.measurement
        _, tried = decide(given.model, given.task, given.rows, what.units, what.measure)
    write_probe(context, tried if context.method.terms == 1 else None)


def write_probe(context: Context, tried: CoverageTrial | None) -> None:
    """Of what was `tried` already, if it was."""
    if tried is None:
        where = evenly(len(context.given.rows), PROBED)
        features = probed(context, where)
    else:
        first = {i: n for n, i in reversed([*enumerate(tried.where)])}  # the same example may be there twice
        where = sorted(first)[:PROBED]
        features = tried.features[[first[i] for i in where]].float().cpu()
    write_shard(
        probe_of(context.folder, context.manifest),
        context.manifest.id,
        {"where": torch.tensor(where), "features": features},
    )


def probe_of(folder: StorePath, manifest: Manifest) -> StorePath:
    return folder / layout.version(layout.PROBE, manifest.generation)


def changed_by_code(context: Context) -> str | None:
    """How features of the probe come out now, if not as they did; None if they do."""
    try:
        noted = read_shard(probe_of(context.folder, context.manifest), context.manifest.id)
    except ShardError as e:
        return f"whether it gives the same features cannot be told ({e})"
    where, then = noted["where"], noted["features"]
    if len(where) != len(then) or not all(0 <= i < context.manifest.examples for i in where.tolist()):
        return "whether it gives the same features cannot be told (the probe is not of these examples)"
    now = probed(context, where.tolist())
    error = (now - then).norm(dim=1)
    bound = TOLERANCE[next(context.given.model.parameters()).dtype] * then.norm(dim=1)
    wrong = (~(error <= bound)).nonzero()[:, 0]
    if not len(wrong):
        return None
    worst = int(wrong[0])
    off = 100 * float(error[worst] / then[worst].norm().clamp(min=1e-38))
    return f"the features of example {int(where[worst])} come out {off:.3g} % different"


def note_accepted(folder: StorePath, identity: dict[str, Any]) -> None:
    """That somebody opened the index with other code and said that it computes the same."""
    entry = {"accepted_code": identity.get("code"), "task": identity["name"]}
    append_line(folder / layout.LOG, json.dumps(entry))
