"""Files that are whole or not there, and that no planted link leads elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from unde.errors import UndeError

PARTIAL = (
    ".partial"  # what a kill can leave behind ends in this, is never read, and is cleared by the next writer
)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


class CannotWrite(UndeError, OSError):
    """A file that the system does not let us write."""

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.errno, self.strerror = error.errno, error.strerror

    def __str__(self) -> str:
        return str(self.args[0])


def write_atomically(path: Path, content: bytes) -> None:
    """All of the file or none of it, also after a kill or a power cut; an error leaves the old file.

    It is written under a name that nobody could foresee and that was not there: a link in its place is no way out of
    the folder, and writers do not meet.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = stat.S_IFMT(os.lstat(path).st_mode)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):  # to be written to, not replaced by a file
            raise OSError(errno.EINVAL, "it is a device", str(path))
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with open(temporary, "wb", opener=_fresh) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # the new name must reach the disk too, where folders can be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _fresh(path: str, _flags: int) -> int:
    return os.open(path, _NEW, 0o666)


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_atomically`, with an error that says what to do."""
    try:
        write_atomically(path, content)
    except OSError as e:
        raise CannotWrite(
            f"cannot write {path} ({e.strerror}): nothing half-written is left behind. Make room for "
            f"{len(content):,} bytes there and run the same call again, it goes on where it stopped",
            e,
        ) from e


def append_line(path: Path, line: str) -> None:
    """To a log, if that can be: it is no part of what is kept. No link is followed, no pipe waited for."""
    flags = (
        os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    )
    with contextlib.suppress(OSError), os.fdopen(os.open(path, flags, 0o666), "a") as file:
        file.write(line + "\n")


def clear_partial(folder: Path) -> None:
    """Remove what killed writers left in a folder. Only for who holds its lock, or knows to be its only writer."""
    for path in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):
            path.unlink()
