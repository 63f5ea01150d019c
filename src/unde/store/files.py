"""Files that are whole or not there, and that no planted link leads elsewhere; and objects, which are by themselves."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO

from unde.errors import UndeError
from unde.store.remote import Remote, StorePath, Unreachable, exists

Content = bytes | Sequence[bytes | memoryview]  # whole, or in parts that follow one another
PARTIAL = (
    ".partial"  # what a kill can leave behind ends in this, is never read, and is cleared by the next writer
)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_APPENDED = (
    os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
)


class CannotWrite(UndeError, OSError):
    """A file that the system does not let us write."""

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.errno, self.strerror = error.errno, error.strerror

    def __str__(self) -> str:
        return str(self.args[0])


def write_atomically(path: StorePath, content: Content) -> None:
    """All of the file or none of it, also after a kill or a power cut; an error leaves the old file.

    It is written under a name that nobody could foresee and that was not there: a link in its place is no way out of
    the folder, and writers do not meet.
    """
    begin(path, content)()


def begin(path: StorePath, content: Content) -> Callable[[], None]:
    """The first half of `write_atomically`, after which the content may change; what is returned is the other half,
    which waits for the disk and puts the file in its place. Of an object it is all, from a copy."""
    if isinstance(path, Remote):
        return partial(path.write_bytes, joined(content))
    with contextlib.suppress(FileNotFoundError):
        kind = stat.S_IFMT(os.lstat(path).st_mode)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):  # to be written to, not replaced by a file
            raise OSError(errno.EINVAL, "it is a device", str(path))
    temporary = temporary_for(path)
    with _gone_on_error(temporary), ExitStack() as open_until_error:
        file = open_until_error.enter_context(open(temporary, "wb", opener=_fresh))
        for part in _parts(content):
            file.write(part)
        file.flush()
        open_until_error.pop_all()
    return partial(_settle, file, temporary, path)


def _settle(file: BinaryIO, temporary: Path, path: Path) -> None:
    with _gone_on_error(temporary):
        with file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    with contextlib.suppress(OSError):  # the new name must reach the disk too, where folders can be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _gone_on_error(temporary: Path) -> Generator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def temporary_for(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def _fresh(path: str, _flags: int) -> int:
    return os.open(path, _NEW, 0o666)


def joined(content: Content) -> bytes:
    return content if isinstance(content, bytes) else b"".join(content)


def _parts(content: Content) -> Sequence[bytes | memoryview]:
    return [content] if isinstance(content, bytes) else content


def write_bytes(path: StorePath, content: Content) -> None:
    """As `write_atomically`, with an error that says what to do."""
    begin_bytes(path, content)()


def begin_bytes(path: StorePath, content: Content) -> Callable[[], None]:
    """As `begin`, with errors of both halves that say what to do."""
    size = sum(len(part) for part in _parts(content))
    with _told(path, size):
        settle = begin(path, content)

    def told() -> None:
        with _told(path, size):
            settle()

    return told


@contextlib.contextmanager
def _told(path: StorePath, size: int) -> Generator[None]:
    try:
        yield
    except Unreachable:
        raise
    except OSError as e:
        raise CannotWrite(
            f"cannot write {path} ({e.strerror}): nothing half-written is left behind. Make room for "
            f"{size:,} bytes there and run the same call again, it goes on where it stopped",
            e,
        ) from e


def create_bytes(path: StorePath, content: Content) -> bool:
    """As `write_bytes`, unless something is there; whether it was written.

    Locally for who holds the lock of the folder. In a store nobody holds one, and of several that begin at once one
    creates the object and the others are told.
    """
    if isinstance(path, Remote):
        return path.create(joined(content))
    if exists(path):
        return False
    write_bytes(path, content)
    return True


def append_line(path: StorePath, line: str) -> None:
    """To a log, if that can be: it is no part of what is kept. No link is followed, no pipe waited for. An object is
    read and put again: of two at once, one line may be lost."""
    with contextlib.suppress(OSError):
        if isinstance(path, Remote):
            before = path.read_bytes() if path.exists() else b""
            path.write_bytes(before + line.encode() + b"\n")
            return
        with os.fdopen(os.open(path, _APPENDED, 0o666), "a") as file:
            file.write(line + "\n")


def clear_partial(folder: StorePath) -> None:
    """Remove what killed writers left in a folder. Only for who holds its lock, or knows to be its only writer."""
    if isinstance(folder, Remote):
        return  # no writer leaves anything there
    for path in folder.glob(f"*{PARTIAL}"):
        with contextlib.suppress(OSError):
            path.unlink()
