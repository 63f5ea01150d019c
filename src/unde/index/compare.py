"""How an index differs from what is asked for or given, in words."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from unde.groups import Groups
from unde.store.manifest import Manifest, asked


def refused_for(there: Manifest, wanted: Manifest, other: str = "asked for") -> list[str]:
    """What differs between an index on disk and one that is asked for, but for the task and what was settled."""
    out = []
    for name, value in asked(wanted).items():
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


def differs_from(
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
