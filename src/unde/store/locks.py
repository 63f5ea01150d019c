"""One writer at a time in a folder of this machine; in a store of objects, none that disturbs another."""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from unde.errors import UndeError
from unde.store.files import CannotWrite
from unde.store.layout import LOCK
from unde.store.remote import Remote, StorePath
from unde.store.files import check_plain

_ORPHANS = 20.0  # seconds that worker processes may outlive a killed writer, lock in hand


@contextmanager
def locked(
    folder: StorePath, wait: bool = False, doing: str = "building", name: str = LOCK
) -> Generator[None]:
    """The lock goes with the process, also when it is killed.

    In a store of objects nobody waits for anybody. A lock there would outlive a killed writer, and writers do no harm
    to each other: what an index is was settled by whoever created its manifest, all others take it from there, and all
    else is put whole and has the same bytes whoever puts it. Two at once do the work twice. The object `.lock` says who
    is at it, to people, and that one may write is known before the work begins.
    """
    if isinstance(folder, Remote):
        with _noted(folder / name):
            yield
        return
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    with _opened(folder / name) as f:
        give_up = time.monotonic() + _ORPHANS
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wait and (_holder_lives(f) or time.monotonic() > give_up):
                    raise UndeError(
                        f"another process is {doing} {folder} right now: wait for it to end"
                    ) from None
                time.sleep(0.1)
        f.truncate(0)
        f.write(str(os.getpid()))
        f.flush()
        yield


def has_locks(folder: StorePath) -> bool:
    """Object stores have none: a writer there may be at work."""
    return not isinstance(folder, Remote)


@contextmanager
def _noted(note: Remote) -> Generator[None]:
    note.write_bytes(f"{os.getpid()} on {platform.node()}\n".encode())
    try:
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)


def _opened(path: Path) -> IO[str]:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        if os.path.lexists(path) and not path.is_symlink():
            check_plain(path)
        return os.fdopen(os.open(path, flags, 0o666), "a+")
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise UndeError(f"{path} is a link, which is not followed: delete it") from None
        raise CannotWrite(
            f"cannot take the lock {path} ({e.strerror}): the folder must be there and let you write in it, and the "
            "file, if it is there, too",
            e,
        ) from None


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
