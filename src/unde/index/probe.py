"""Features of a few examples, stored with an index: compared to notice a task whose code changed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unde.checkpoints import loaded
from unde.data import evenly, to_device
from unde.gradients.coverage import TOLERANCE, CoverageTrial, decide
from unde.gradients.feature_pass import FeaturePass, resized
from unde.index.build_context import Context, checkpoint_of, step_of
from unde.store import layout
from unde.store.manifest import Manifest
from unde.store.remote import StorePath
from unde.store.shards import ShardError, read_shard, write_shard
from unde.tasks.identity import differences, is_builtin

PROBED = 2  # examples


def changed_task(context: Context) -> list[str]:
    """How the given task differs from that of the index, in words; features are compared for a user's own task."""
    task = context.given.task
    differ = differences(context.manifest.task, task.identity())
    if differ or is_builtin(type(task)):
        return differ
    other = changed_features(context)
    return [] if other is None else [f"what {type(task).__name__} computes ({other})"]


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


def changed_features(context: Context) -> str | None:
    """Compare features of the examples of the probe with those stored; None if they are equal or cannot be read."""
    try:
        noted = read_shard(probe_of(context.folder, context.manifest), context.manifest.id)
    except ShardError:  # lost or damaged: `verify` reports it, a build that goes on writes it again
        return None
    where, then = noted["where"], noted["features"]
    if len(where) != len(then) or not all(0 <= i < context.manifest.examples for i in where.tolist()):
        return "the features to compare with are not of these examples"
    now = probed(context, where.tolist())
    error = (now - then).norm(dim=1)
    bound = TOLERANCE[next(context.given.model.parameters()).dtype] * then.norm(dim=1)
    wrong = (~(error <= bound)).nonzero()[:, 0]
    if not len(wrong):
        return None
    worst = int(wrong[0])
    off = 100 * float(error[worst] / then[worst].norm().clamp(min=1e-38))
    return f"features of example {int(where[worst])} differ by {off:.3g} %"
