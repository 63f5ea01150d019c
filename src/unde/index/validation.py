"""Whether an index is whole: every shard there, sound, and of this index."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unde.checkpoints import loaded, select_checkpoint
from unde.data import Rows, evenly, to_device
from unde.errors import UndeError
from unde.fingerprints import ids_fingerprint
from unde.gradients.coverage import TOLERANCE, CoverageTrial, decide
from unde.groups import Groups
from unde.index.feature_runner import FeatureRunner
from unde.index.shard_writer import Shapes
from unde.store import layout
from unde.store.manifest import Manifest, request_fields
from unde.store.remote import Remote, StorePath, Unreachable
from unde.store.safe_io import read_json
from unde.store.shards import ShardError, read_shard, write_shard
from unde.tasks.identity import differences, is_builtin

_SMALL, _LONGEST_ID = 2**20, 2**12  # bytes of the ids of any index, and of an id on average


def check_shards(folder: StorePath, manifest: Manifest, verify: bool) -> None:
    """Every shard there, whole and at its place; one is in memory at a time. Remote ones are fetched for it, unless
    checksums are not asked for: then each is checked when it is first read."""
    count = len(manifest.shards)
    paths = [manifest.shard(folder, c, s) for c in range(manifest.terms) for s in range(count)]
    missing = _missing(paths)
    if missing:
        raise ShardError(
            f"{folder} is not finished: {len(missing)} of {len(paths)} shards are missing "
            f"({', '.join(missing[:5])}{', …' if missing[5:] else ''}). "
            "Run the same Index.build again to finish it"
        )
    problems, shapes = [], Shapes(manifest)
    for path in paths if verify or not isinstance(folder, Remote) else ():
        try:
            shapes.read(path, verify)
        except ShardError as e:
            problems.append(str(e))
    if problems:
        more = f"; and {len(problems) - 5} more" if problems[5:] else ""
        raise ShardError(
            f"{'; '.join(problems[:5])}{more}. Run the same Index.build again to repair the index"
        )


def _missing(paths: Sequence[StorePath]) -> list[str]:
    """Of this machine, what cannot be looked at may well be there: its error is told when it is read."""
    if isinstance(paths[0], Remote):
        there = layout.list_names(paths[0].parent)
        return [p.name for p in paths if p.name not in there]
    missing = []
    for path in paths:
        try:
            os.lstat(str(path))
        except FileNotFoundError:
            missing.append(path.name)
        except OSError:
            continue
    return missing


def read_ids(folder: StorePath, manifest: Manifest) -> list[Any] | None:
    """The user's names; a file that claims far more of them than there are examples is not even read."""
    if not manifest.ids:
        return None
    path = folder / layout.versioned_name(layout.IDS, manifest.generation)
    try:
        ids = read_json(path, max(_SMALL, _LONGEST_ID * manifest.examples))
        if not isinstance(ids, list) or len(ids) != manifest.examples:
            ids = []
    except Unreachable:
        raise
    except (OSError, ValueError):
        ids = []
    if ids_fingerprint(ids) != manifest.ids:
        raise UndeError(f"{path} is missing or damaged: run the same Index.build again to repair it")
    return ids


def list_differences(there: Manifest, wanted: Manifest, other: str = "asked for") -> list[str]:
    """What differs between an index on disk and one that is asked for, but for the task and what was settled."""
    out = []
    for name, value in request_fields(wanted).items():
        old = getattr(there, name)
        same = json.dumps(old) == json.dumps(value)  # order counts: it is part of the id
        if same or name in ("schema", "task") or (name == "data" and there.examples != wanted.examples):
            continue
        out.append(_words(name, old, value, other))
    return out


def _words(name: str, old: Any, value: Any, other: str) -> str:
    if name == "models" and len(old) != len(value):
        return f"the checkpoints ({len(old)} there, {len(value)} {other})"
    if name == "models":
        return "the model's weights (other values)"
    if name == "data":
        return "the training data (same length, other content)"
    if name == "ids":
        return "the ids" if old and value else f"the ids (there are {'some' if old else 'none'})"
    if name in ("units", "groups"):
        return f"the {'parameters' if name == 'units' else name} ({brief(old, value, other)})"
    if name == "matrices":
        return "the directions of pca or the second moments (other values)"
    if name == "factors":
        return f"the covariances for EKFAC ({'some' if old else 'none'} there)"
    if name == "examples":
        return f"the length of the training data ({old} there, {value} given)"
    return f"{name} ({old!r} there, {value!r} {other})"


def brief(old: Any, new: Any, other: str = "asked for") -> str:
    named = [{u["name"]: u for u in x} if isinstance(x, list) else x for x in (old, new)]
    lone = [n for n in [*named[0], *named[1]] if n not in named[0] or n not in named[1]]
    if lone:
        return f"{len(named[0])} there, {len(named[1])} {other}; e.g. {lone[0]!r} is in one only"
    differ = [n for n in named[0] if named[0][n] != named[1][n]]
    return f"{differ[0]!r} is not the same" if differ else "in another order"


def compare_inputs(
    manifest: Manifest,
    model: nn.Module | None,
    models: list[str],
    groups: Groups | None,
) -> list[str]:
    """How an index differs from what is given to open it with, but for the task and the data."""
    out = [] if model is None else _model_differences(manifest, model, models)
    if groups is not None:
        given = {k: list(v) for k, v in groups.members.items()}
        if list(given.items()) != list(manifest.groups.items()):
            out.append(f"the groups ({brief(manifest.groups, given)})")
    return out


def _model_differences(manifest: Manifest, model: nn.Module, models: list[str]) -> list[str]:
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


PROBED = 2  # examples


def changed_task(runner: FeatureRunner, rows: Rows) -> list[str]:
    """How the given task differs from that of the index, in words; features are compared for a user's own task."""
    task = runner.inputs.task
    differ = differences(runner.manifest.task, task.identity())
    if differ or is_builtin(type(task)):
        return differ
    other = changed_features(runner, rows)
    return [] if other is None else [f"what {type(task).__name__} computes ({other})"]


def _probe_features(runner: FeatureRunner, rows: Rows, where: list[int]) -> Tensor:
    """Features of a few examples under the first checkpoint."""
    try:
        run = runner.open_pass(0, factors=False)
        batch = to_device(rows.batch(where), run.collect.device)
        return run.collect(batch, runner.sample_numbers(where))[0].float().cpu()
    finally:
        runner.close()


def restore_probe(runner: FeatureRunner, rows: Rows) -> None:
    """Write the probe again, by the same computation."""
    inputs, what = runner.inputs, runner.measurement
    with loaded(inputs.model, select_checkpoint(inputs.checkpoints, 0)):
        _, trial = decide(inputs.model, inputs.task, rows, what.units, what.measure)
    write_probe(runner, rows, trial if runner.method.terms == 1 else None)


def write_probe(runner: FeatureRunner, rows: Rows, tried: CoverageTrial | None) -> None:
    """Store the features of a few examples, those of a trial if there was one."""
    if tried is None:
        where = evenly(len(rows), PROBED)
        features = _probe_features(runner, rows, where)
    else:
        first = {i: n for n, i in reversed([*enumerate(tried.where)])}  # the same example may be there twice
        where = sorted(first)[:PROBED]
        features = tried.features[[first[i] for i in where]].float().cpu()
    write_shard(
        probe_of(runner.folder, runner.manifest),
        runner.manifest.id,
        {"where": torch.tensor(where), "features": features},
    )


def probe_of(folder: StorePath, manifest: Manifest) -> StorePath:
    return folder / layout.versioned_name(layout.PROBE, manifest.generation)


def changed_features(runner: FeatureRunner, rows: Rows) -> str | None:
    """Compare features of the examples of the probe with those stored; None if they are equal or cannot be read."""
    try:
        probe = read_shard(probe_of(runner.folder, runner.manifest), runner.manifest.id)
    except ShardError:  # lost or damaged: `verify` reports it, a build that goes on writes it again
        return None
    where, then = probe["where"], probe["features"]
    if len(where) != len(then) or not all(0 <= i < runner.manifest.examples for i in where.tolist()):
        return "the features to compare with are not of these examples"
    now = _probe_features(runner, rows, where.tolist())
    error = (now - then).norm(dim=1)
    bound = TOLERANCE[next(runner.inputs.model.parameters()).dtype] * then.norm(dim=1)
    wrong = (~(error <= bound)).nonzero()[:, 0]
    if not len(wrong):
        return None
    worst = int(wrong[0])
    off = 100 * float(error[worst] / then[worst].norm().clamp(min=1e-38))
    return f"features of example {int(where[worst])} differ by {off:.3g} %"
