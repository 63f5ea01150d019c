"""Manifests that somebody has made up, with the right id and with shards that belong to them."""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from benchmarks.faults import world
from benchmarks.faults.trial import RAW, Tally, tried
from unde.index.verify import verify
from unde.store import layout
from unde.store.manifest import _id
from unde.store.shards import read_shard, write_shard

CATEGORY = "hostile manifests"
MEMORY = 2**28  # bytes beside what the process has already: no manifest of a toy may take more
VALUES: tuple[Any, ...] = (
    0, -1, 1, 2, 10**6, 10**9, 2**31, 2**63, 10**15, 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    True, False, None, "", "x", "\x1b[2J", "../../etc/passwd", "a" * 10_000, "\ud800", [], {}, [None], [[]], [0] * 1000,
    {"name": "x"}, {"": None}, ["0.weight"], "nan", "trak", "none", "kron(99999)", "dense(10000000000)", [[[[[[]]]]]],
)  # fmt: skip


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, v in inside for path in _paths(v, (*at, key)))]


def forged(manifest: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """With one to three places changed."""
    made = json.loads(json.dumps(manifest))
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        path = chance.choice(_paths(made)[1:])
        home = made
        for key in path[:-1]:
            home = home[key]
        what = chance.random()
        if what < 0.75:
            home[path[-1]] = chance.choice(VALUES)
        elif what < 0.9:
            del home[path[-1]]
        elif isinstance(home, list):
            home.extend(home[:] * chance.choice((1, 50)))
        else:
            home[str(chance.choice(VALUES))[:20]] = home[path[-1]]
    return made


def run(tally: Tally, folder: Path, chance: random.Random, count: int) -> None:
    kinds = [(kind, folder / f"forged-{kind.name}") for kind in world.KINDS]
    whole = []
    for kind, place in kinds:
        kind.whole(place)
        whole.append(world.everything(place))
    for number in range(count):
        (kind, place), files = kinds[number % len(kinds)], whole[number % len(kinds)]
        manifest = json.loads(files[layout.MANIFEST])
        old = manifest.pop("id")
        made = forged(manifest, chance)
        _own(place, old, made, adopt=number % 4 != 0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcome, why = tried(lambda kind=kind, place=place: _asked(kind, place))
        if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 > MEMORY:
            outcome, why = RAW, "it took all memory"
        if outcome != RAW:
            looked, told = tried(lambda place=place: verify(place) is not None)
            outcome, why = (looked, told) if looked == RAW else (outcome, why)
        tally.note(CATEGORY, outcome, f"{why} for {_difference(manifest, made)}")
        world.restore(place, files)


def _own(place: Path, old: str, made: dict[str, Any], adopt: bool) -> None:
    """The manifest under its own id; the shards become its own too, if `adopt`."""
    new = _id(made)
    for path in (place / layout.SHARDS).glob("*.safetensors") if adopt else ():
        tensors = {name: t.clone() for name, t in read_shard(path, old).items()}
        write_shard(path, new, tensors)
        shutil.rmtree(place / layout.QUERIES, ignore_errors=True)  # these are of the index as it was
    (place / layout.MANIFEST).write_text(json.dumps({"id": new} | made))


def _asked(kind: world.Kind, place: Path) -> bool:
    """Whoever signs everything has made another index: what that gives is right if it is made of numbers."""
    with redirect_stderr(io.StringIO()):
        return all(t.dtype.is_floating_point or t.numel() for t in kind.asked(place).values())


def _difference(a: Any, b: Any) -> str:
    known, found = dict.fromkeys(_paths(a)), []
    for path in _paths(b):
        value = b
        for key in path:
            value = value[key]
        if path not in known and not isinstance(value, (dict, list)):
            found.append(f"{path} = {str(value)[:40]!r}")
            continue
        try:
            was = a
            for key in path:
                was = was[key]
        except (KeyError, IndexError, TypeError):
            continue
        if not isinstance(value, (dict, list)) and repr(was) != repr(value):
            found.append(f"{path}: {str(was)[:20]!r} → {str(value)[:40]!r}")
    return "; ".join(found[:3]) or "something left out"
