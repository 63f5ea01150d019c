"""Files of local folders and object stores: atomic writes, and reads that are safe on files of unknown origin."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unde.errors import UndeError
from unde.store.remote import StorePath, Unreachable, exists, is_local

Content = bytes | Sequence[bytes | memoryview]  # whole, or in consecutive parts
PARTIAL = ".partial"  # suffix of temporary files: never read, cleared by the next writer
LONGEST = 64 * 2**20  # bytes of a JSON file
_HEADER = 2**24  # bytes of the header of a file of tensors
_CONTAINERS = 2**22  # lists and objects in a JSON file: they take far more memory than bytes on disk
_NO_FOLLOW, _NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_FOLLOW | _NO_WAIT


class CannotWrite(UndeError, OSError):
    """A file that the operating system does not let us write."""

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.errno, self.strerror = error.errno, error.strerror

    def __str__(self) -> str:
        return str(self.args[0])


# --- writing --------------------------------------------------------------------------------------------


def write_atomically(path: StorePath, content: Content) -> None:
    """Write all of a file or nothing, also after a kill or a power cut; on an error the old file stays.

    The temporary file has a random name and must be new, so planted links are not followed and concurrent writers do
    not collide. Objects are put by one request.
    """
    if not is_local(path):
        path.write_bytes(content if isinstance(content, bytes) else b"".join(content))
        return
    with contextlib.suppress(FileNotFoundError):
        kind = stat.S_IFMT(os.lstat(path).st_mode)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):  # a rename would replace it by a file
            raise OSError(errno.EINVAL, "it is a device", str(path))
    temporary = temporary_for(path)
    try:
        with open(temporary, "wb", opener=_open_new) as file:
            for part in _parts(content):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _open_new(path: str, _flags: int) -> int:
    return os.open(path, _NEW, 0o666)


def _sync_folder(folder: Path) -> None:
    """Write the new name to disk, where folders can be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _parts(content: Content) -> Sequence[bytes | memoryview]:
    return [content] if isinstance(content, bytes) else content


def temporary_for(path: Path) -> Path:
    """A random name beside a file."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def write_bytes(path: StorePath, content: Content) -> None:
    """`write_atomically`, with errors that say what to do."""
    try:
        write_atomically(path, content)
    except Unreachable:
        raise
    except OSError as e:
        size = sum(len(part) for part in _parts(content))
        raise CannotWrite(
            f"cannot write {path} ({e.strerror}): nothing half-written is left behind. Make room for "
            f"{size:,} bytes there and run the same call again, it goes on where it stopped",
            e,
        ) from e


def create_bytes(path: StorePath, content: Content) -> bool:
    """Write a file unless one exists; return whether it was written.

    Local callers hold the lock of the folder. In an object store one of several concurrent writers creates the object.
    """
    if not is_local(path):
        return path.create(content if isinstance(content, bytes) else b"".join(content))
    if exists(path):
        return False
    write_bytes(path, content)
    return True


def append_line(path: StorePath, line: str) -> None:
    """Append to a log; errors are ignored. Links are not followed, pipes not waited for. An object is read and written
    again, so one of two concurrent lines may be lost."""
    with contextlib.suppress(OSError):
        if not is_local(path):
            before = path.read_bytes() if path.exists() else b""
            path.write_bytes(before + line.encode() + b"\n")
            return
        with os.fdopen(os.open(path, _APPEND, 0o666), "a") as file:
            file.write(line + "\n")


def clear_partial(folder: StorePath, pattern: str = "*") -> None:
    """Delete temporary files of killed writers in a local folder. The caller holds its lock or is its only writer."""
    if is_local(folder):
        for path in folder.glob(pattern + PARTIAL):
            with contextlib.suppress(OSError):
                path.unlink()


# --- reading --------------------------------------------------------------------------------------------


def check_plain(path: StorePath, follow: bool = False) -> int:
    """The size of a plain file; an OSError for folders, links (unless `follow`), pipes and devices."""
    if not is_local(path):
        info = path.info()
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return info["size"]
    return _check_regular(os.stat(path, follow_symlinks=follow), path)


def _check_regular(status: os.stat_result, path: StorePath) -> int:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return status.st_size


def read_start(path: StorePath, count: int) -> bytes:
    """The first `count` bytes of a file."""
    if not is_local(path):
        return path.read_bytes(first=count)
    with path.open("rb") as file:
        return file.read(count)


def read_bounded(path: StorePath, longest: int = LONGEST, follow: bool = False) -> bytes:
    """The content of a plain file: an OSError if it cannot be read, a ValueError if it is too long."""
    size = check_plain(path, follow)
    if size > longest:
        raise ValueError(f"it is longer than {longest:,} bytes")
    if not is_local(path):
        return path.read_bytes()
    # The file may have been replaced since by a link, a pipe or a longer one.
    descriptor = os.open(path, os.O_RDONLY | (0 if follow else _NO_FOLLOW) | _NO_WAIT)
    with os.fdopen(descriptor, "rb") as file:
        size = _check_regular(os.fstat(descriptor), path)
        content = file.read(min(size, longest) + 1)
    if len(content) > longest:
        raise ValueError(f"it is longer than {longest:,} bytes")
    return content


def check_header(path: Path) -> None:
    """Check that a file of tensors is plain and its header short, before the header is parsed."""
    check_plain(path)
    length = int.from_bytes(read_start(path, 8), "little")
    if length > _HEADER:
        raise ValueError(f"a header of {length:,} bytes")


def read_json(path: StorePath, longest: int = LONGEST, follow: bool = False) -> Any:
    """The content of a JSON file: a ValueError says what is wrong with it, an OSError that it cannot be read."""
    content = read_bounded(path, longest, follow)
    if content.count(b"[") + content.count(b"{") > _CONTAINERS:
        raise ValueError(f"it holds more than {_CONTAINERS:,} lists and objects")
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_settings(settings: dict[str, Any]) -> None:
    """Raise a ValueError if settings do not match their `checksum`."""
    if settings.get("checksum") != settings_checksum(settings):
        raise ValueError("its content does not match its checksum")


def checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def settings_checksum(settings: dict[str, Any]) -> str:
    rest = {name: value for name, value in settings.items() if name != "checksum"}
    return checksum(json.dumps(rest, sort_keys=True))
