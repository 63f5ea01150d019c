"""Builds the same index again and again in processes that are killed, until it is whole. Run as a program.

A process of its own, so that torch and all that a first build imports is there, before any threads are, and every
attempt is a fork. Prints one JSON object: how often an attempt was killed in each way.
"""

import builtins
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import toy
from unde.store import files

STEPS = ("opened", "half written", "written", "synced", "renamed")
TIMED = 12  # kills at random moments, at least


def build(folder: Path) -> None:
    """With another memory budget wherever a build goes on: what was settled for it counts."""
    states = [toy.net(1).state_dict(), toy.net(2).state_dict()]
    memory = random.choice(("50MB", "3kB")) if (folder / "manifest.json").exists() else "50MB"
    ids = [f"#{i}" for i in range(30)]
    toy.build(folder, 30, checkpoints=states, ids=ids, store_dtype="float16", memory=memory)


def slow_disk() -> None:
    """Give random kills time to fall between the steps of a write."""
    sync = os.fsync
    os.fsync = lambda fd: (time.sleep(0.004), sync(fd))[1]


def die_at(step: str, count: int) -> None:
    """Be killed at the count-th time that a file reaches this step of its writing."""
    seen: Counter[str] = Counter()

    def reached(name: str) -> None:
        seen[name] += 1
        if name == step and seen[name] == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sync, replace = os.fsync, os.replace

    class File:
        def __init__(self, path: Path, mode: str, opener: Callable[[str, int], int]) -> None:
            self.file = builtins.open(path, mode, opener=opener)  # noqa: SIM115
            reached("opened")

        def write(self, content: bytes) -> None:
            middle = len(content) // 2
            self.file.write(content[:middle])
            self.file.flush()
            reached("half written")
            self.file.write(content[middle:])

        def flush(self) -> None:
            self.file.flush()
            reached("written")

        def fileno(self) -> int:
            return self.file.fileno()

        def __enter__(self) -> "File":
            return self

        def __exit__(self, *exc: object) -> None:
            self.file.close()

    def replaced(a: Path, b: Path) -> None:
        reached("synced")
        replace(a, b)
        reached("renamed")

    files.open = File
    os.fsync, os.replace = sync, replaced


def attempt(folder: Path, prepare: Callable[[], None], seconds: float | None = None) -> bool:
    """One process that builds; True if it was killed, by itself or after `seconds`."""
    child = os.fork()
    if child == 0:
        try:
            prepare()
            build(folder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        sys.exit("an attempt failed")
    return False


def main(out: Path, seed: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    kills: Counter[str] = Counter()
    build(out / "first")
    started = time.monotonic()
    attempt(out / "whole", slow_disk)
    usual = time.monotonic() - started

    for number in range(200):
        step, count = STEPS[number % len(STEPS)], chance.randint(1, 3)
        if not attempt(out / "by-step", partial(die_at, step, count)):
            break
        kills[step] += 1
    for number in range(50):
        while attempt(out / f"timed-{number}", slow_disk, chance.uniform(0.1, 1.0) * usual):
            kills["timed"] += 1
        if number and kills["timed"] >= TIMED:
            break
    print(json.dumps(kills))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
