"""Locks of local folders: one writer at a time."""

from __future__ import annotations

import errno
import os
import platform
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from unde.errors import UndeError
from unde.store.files import CannotWrite, check_plain
from unde.store.layout import LOCK
from unde.store.remote import Remote, StorePath, is_local

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_ORPHANS = 20.0  # seconds that worker processes may outlive a killed writer, whose lock they inherit
_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
_LOCKED_BYTE = 2**30  # locks of Windows forbid reads too: past the end, the id of the process stays readable


@contextmanager
def locked(folder: StorePath, wait: bool = False, doing: str = "building") -> Generator[None]:
    """Hold the lock of a folder, which ends with the process, also when it is killed.

    Object stores have no locks, and writers do not need them: the first to create the manifest decides what the index
    is, and all other objects are put atomically with the same bytes, whoever puts them. Two concurrent builds do the
    work twice. The object `.lock` names the writer to people, and shows early whether objects can be written.
    """
    if not is_local(folder):
        with _announce(folder / LOCK):
            yield
        return
    with _open_lock(folder / LOCK) as file:
        _acquire(file, folder, wait, doing)
        try:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield
        finally:
            _unlock(file)


def _acquire(file: IO[str], folder: Path, wait: bool, doing: str) -> None:
    give_up = time.monotonic() + _ORPHANS
    while True:
        try:
            return _try_lock(file)
        except OSError as e:
            if e.errno not in _HELD:
                raise CannotWrite(
                    f"cannot lock {folder} ({e.strerror}): choose a disk that has locks", e
                ) from e
            if not wait and (_holder_lives(file) or time.monotonic() > give_up):
                raise UndeError(
                    f"another process is {doing} {folder} right now: wait for it to end"
                ) from None
        time.sleep(0.1)


def _try_lock(file: IO[str]) -> None:
    """Lock a file; raise an OSError at once if another process holds the lock."""
    if sys.platform == "win32":
        os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(file: IO[str]) -> None:
    """Unlock a file on Windows; elsewhere closing does it, and worker processes that inherit the lock keep it."""
    if sys.platform == "win32":
        os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)


@contextmanager
def _announce(note: Remote) -> Generator[None]:
    """Name this process in an object as long as the block runs."""
    note.write_bytes(f"{os.getpid()} on {platform.node()}\n".encode())
    try:
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)


def _open_lock(path: Path) -> IO[str]:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        if os.path.lexists(path) and not path.is_symlink():
            check_plain(path)
        return os.fdopen(os.open(path, flags, 0o666), "a+")
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise UndeError(f"{path} is a link, which is not followed: delete it") from None
        raise CannotWrite(
            f"cannot take the lock {path} ({e.strerror}): the folder must exist and be writable, and the file, if it "
            "exists, too",
            e,
        ) from None


def _holder_lives(lock: IO[str]) -> bool:
    """Whether the process that took the lock still runs; on POSIX its data workers inherit the lock and end later."""
    lock.seek(0)
    holder = lock.read().strip()
    if sys.platform == "win32":  # locks are not inherited, and os.kill(pid, 0) would interrupt the process
        return True
    try:
        os.kill(int(holder), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError):
        return holder != ""
    return True
