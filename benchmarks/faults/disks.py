"""Disks that are full after some bytes or some files: whatever was whole stays so, and the same call ends it later."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from unittest import mock

from benchmarks.faults import world
from benchmarks.faults.trial import CLEAR, LOST, RAW, RIGHT, WRONG, Tally, tried
from unde import Weights
from unde.evaluate import Bank

CATEGORY = "full disks"


@contextmanager
def full(after: int, at: str, folder: Path) -> Generator[None]:
    """Nothing more can be written in the folder once so many files have been."""
    real, seen = getattr(os, at), [0]

    def refused(*args: object) -> object:
        inside = at == "fsync" or str(args[-1]).startswith(str(folder))
        if inside:
            seen[0] += 1
            if seen[0] > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    with mock.patch.object(os, at, refused):
        yield


def _index(kind: world.Kind, folder: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    place, whole = folder / "full" / kind.name, folder / f"disk-{kind.name}"
    want = kind.whole(whole) if not whole.exists() else kind.asked(whole)

    def work() -> None:
        kind.build(place)
        with redirect_stderr(io.StringIO()):
            kind.asked(place)

    def right() -> bool:
        work()
        shutil.rmtree(place / "kernels", ignore_errors=True)
        return world.same(kind.asked(place), want) and not list(place.rglob("*.partial"))

    return work, right


def _bank(folder: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    path, whole = folder / "full" / "b.npz", folder / "disk.npz"
    want = world.arrays(world.run_bank(whole))

    def right() -> bool:
        world.run_bank(path)
        return world.same(world.arrays(Bank.open(path)), want)

    return lambda: world.run_bank(path) and None, right


def _weights(folder: Path) -> tuple[Callable[[], None], Callable[[], bool]]:
    path = folder / "full" / "w.json"
    path.parent.mkdir(exist_ok=True)
    world.weights().save(path)

    def right() -> bool:
        return world.same(world.held(Weights.load(path)), world.held(world.weights()))

    return lambda: world.weights().save(path), right


def run(tally: Tally, folder: Path, chance: random.Random, count: int) -> None:
    makers = [
        *(lambda kind=kind: _index(kind, folder) for kind in world.KINDS),
        lambda: _bank(folder),
        lambda: _weights(folder),
    ]
    for number in range(count):
        work, right = makers[number % len(makers)]()
        after, at = (
            chance.randrange(12 if number % len(makers) < 3 else 1),
            chance.choice(("fsync", "replace")),
        )
        with full(after, at, folder / "full"):
            outcome, why = tried(lambda work=work: work() is None)
        if outcome != RAW:
            again, more = tried(right)  # with room: what was written is still there, and the rest follows
            if again != RIGHT:
                outcome, why = (WRONG if again == WRONG else LOST), f"{why}; then {again}: {more}"
        assert outcome != CLEAR or why
        tally.note(CATEGORY, outcome, f"{at} {after}: {why}")
        shutil.rmtree(folder / "full", ignore_errors=True)
