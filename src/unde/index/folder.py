"""The folder of an index: nobody else's files, and one writer at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from unde.errors import UndeError
from unde.files import PARTIAL
from unde.index.manifest import FILE

LOG = "log.jsonl"
LOCK = ".lock"
GIVEN = "projection.safetensors"  # matrices of the projection that are not drawn
FISHER = "fisher"  # an index of gradients with sampled labels, where EKFAC asks for it
_WRITTEN = {"ids.json", GIVEN, FILE}
_OURS = {"shards", "kernels", FISHER, LOCK, LOG, *_WRITTEN, *(f + PARTIAL for f in _WRITTEN)}
_ORPHANS = 20.0  # seconds that worker processes may outlive a killed builder, lock in hand


def prepare_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UndeError(f"{folder} is a file: an index needs a folder")
    if folder.exists() and not (folder / FILE).exists():
        foreign = sorted(p.name for p in folder.iterdir() if p.name not in _OURS)
        if foreign:
            raise UndeError(
                f"{folder} holds something else ({', '.join(foreign[:3])}{', …' if foreign[3:] else ''}): "
                "choose an empty or new folder for the index"
            )
    folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def locked(folder: Path, wait: bool = False) -> Generator[None]:
    """One writer at a time; the lock goes with the process, also when it is killed."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    with open(folder / LOCK, "a+") as f:
        give_up = time.monotonic() + _ORPHANS
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wait and (_holder_lives(f) or time.monotonic() > give_up):
                    raise UndeError(
                        f"another process is building {folder} right now: wait for it to end"
                    ) from None
                time.sleep(0.1)
        f.truncate(0)
        f.write(str(os.getpid()))
        f.flush()
        yield


def _holder_lives(lock: IO[str]) -> bool:
    """Whether the process that took the lock still runs; its data workers inherit the lock and end later."""
    lock.seek(0)
    noted = lock.read().strip()
    try:
        os.kill(int(noted), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError):
        return noted != ""
    return True
