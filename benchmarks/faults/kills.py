"""SIGKILL at random moments: builds and banks, in one process and in two, until they are done."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from benchmarks.faults import world
from benchmarks.faults.trial import BAD, LOST, RAW, RIGHT, Tally, tried
from unde import Setup, UndeError
from unde.evaluate import Bank
from unde.index.verify import verify
from unde.tasks import Classification

CATEGORY, SEVERAL = "kills", "kills of several processes"
PATIENCE = 40  # kills of one build, at most
RECIPE = {"executor": "processes:2", "recipe": "benchmarks.faults.kills:make"}


def make() -> Setup:
    """What worker processes make for themselves."""
    ids = [f"row {i}" for i in range(world.EXAMPLES)]
    return Setup(world.net(), Classification(), world.TRAIN, ids=ids)


def _child(run: Callable[[], object], seconds: float) -> bool | None:
    """A fork that runs it, killed after a while: True if it was, None if it failed by itself."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sync = os.fsync
            os.fsync = lambda fd: (time.sleep(0.002), sync(fd))[
                1
            ]  # so that kills fall between the steps of a write
            run()
            code = 0
        finally:
            os._exit(code)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return True if os.WIFSIGNALED(status) else None if os.WEXITSTATUS(status) else False


def _until_done(run: Callable[[], object], usual: float, chance: random.Random) -> tuple[int, bool]:
    """How often it was killed before it was done, and whether every attempt ended well or by a kill."""
    for kills in range(PATIENCE):
        killed = _child(run, chance.uniform(0.02, 1.1) * usual)
        if killed is None:
            return kills, False
        if not killed:
            return kills, True
    return PATIENCE, True


def _trial(
    tally: Tally, run: Callable[[], object], right: Callable[[], bool], usual: float, chance: random.Random
) -> int:
    kills, well = _until_done(run, usual, chance)
    outcome, why = tried(lambda: (run(), right())[1])
    if not well:
        outcome, why = RAW, "an attempt failed by itself"
    elif outcome != RIGHT:
        outcome, why = LOST, f"after {kills} kills: {outcome} {why}"
    for _ in range(kills or outcome in BAD):
        tally.note(CATEGORY, outcome, why)
    return kills


def run(tally: Tally, folder: Path, chance: random.Random, count: int) -> None:
    done = number = 0
    while done < count:
        kind, place = world.KINDS[number % len(world.KINDS)], folder / f"killed-{number}"
        whole = folder / f"unkilled-{kind.name}"
        started = time.monotonic()
        if number % 3 < 2:
            kind.build(whole)
            usual = max(0.3, time.monotonic() - started)
            want = world.content(whole)

            def right(place: Path = place, want: dict[str, bytes] = want) -> bool:
                return world.content(place) == want and bool(verify(place))

            done += _trial(tally, lambda kind=kind, place=place: kind.build(place), right, usual, chance)
        else:
            place = place.with_suffix(".npz")
            want_arrays = world.arrays(world.run_bank(folder / "unkilled.npz"))

            def same(place: Path = place, want: dict = want_arrays) -> bool:
                return world.same(world.arrays(Bank.open(place)), want)

            done += _trial(tally, lambda place=place: world.run_bank(place), same, 0.15, chance)
        shutil.rmtree(place, ignore_errors=True)
        number += 1


def run_several(tally: Tally, folder: Path, chance: random.Random, count: int) -> None:
    """Two worker processes, of which one is killed now and then, or their parent: nobody is left behind."""
    for number in range(count):
        kind = world.KINDS[0]
        bank = number % 2 == 1
        place = folder / (f"several-{number}" + (".npz" if bank else ""))

        def work(place: Path = place, bank: bool = bank) -> None:
            with suppress(UndeError):  # such as: workers are killed all the time
                world.run_bank(place, processes=2) if bank else world.KINDS[0].build(place, **RECIPE)

        parent = multiprocessing.get_context("fork").Process(target=work)
        parent.start()
        deadline, hits = time.monotonic() + chance.uniform(2, 14), 0
        while parent.is_alive() and time.monotonic() < deadline:
            time.sleep(chance.uniform(0.3, 2.0))
            workers = [w for server in _children(parent.pid or 0) for w in (server, *_children(server))]
            if workers:
                hits += 1
                _kill(chance.choice(workers))
        if parent.is_alive():
            _kill(parent.pid or 0)
        parent.join()
        if bank:
            want = world.arrays(world.run_bank(folder / "unkilled-several.npz"))
            outcome, why = tried(
                lambda place=place, want=want: world.same(world.arrays(world.run_bank(place)), want)
            )
        else:
            kind.build(folder / "unkilled-several")
            want_bytes = world.content(folder / "unkilled-several")

            def right(place: Path = place, want: dict[str, bytes] = want_bytes) -> bool:
                world.KINDS[0].build(place)
                return world.content(place) == want

            outcome, why = tried(right)
        tally.note(SEVERAL, outcome if outcome == RIGHT else LOST, f"after {hits} kills: {outcome} {why}")


def _children(parent: int) -> list[int]:
    """Processes that a process has started, as Linux lists them."""
    try:
        return [int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
