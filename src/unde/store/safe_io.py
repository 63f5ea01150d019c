"""Reading what somebody else may have put there: plain files only, none of them longer than expected."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from unde.store.remote import Remote, StorePath

LONGEST = 64 * 2**20  # bytes of a JSON file: no model has more parameters than fit in there
_HEADER = 2**24  # bytes: a line for each of the parameters of a model
_AHEAD = 2**17  # bytes: of more, asked for at once, Linux may read the first only
_CONTAINERS = 2**22  # lists and objects in one: they take far more memory than bytes on disk


def check_plain(path: StorePath, follow: bool = False) -> int:
    """Its size; an OSError for a pipe or a device, which could be read for ever, and for a link, which leads elsewhere
    (`follow`: where a user has named it). Objects are plain."""
    if isinstance(path, Remote):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return path.stat().st_size
    found = os.stat(path, follow_symlinks=follow)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return found.st_size


def ahead(path: StorePath) -> None:
    """Asks the system to read a file before it is needed; nothing where it cannot be asked."""
    if isinstance(path, Remote) or not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for start in range(0, os.fstat(descriptor).st_size, _AHEAD):
                os.posix_fadvise(descriptor, start, _AHEAD, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def read_bounded(path: StorePath, longest: int = LONGEST, follow: bool = False) -> bytes:
    """The content of a plain file. An OSError says that it cannot be read, a ValueError that it is too long."""
    if isinstance(path, Remote):
        if path.stat().st_size > longest:
            raise ValueError(f"it is longer than {longest:,} bytes")
        return path.read_bytes()
    check_plain(path, follow)
    links = 0 if follow else getattr(os, "O_NOFOLLOW", 0)
    # Should a pipe have taken its place meanwhile, nobody waits for its other end.
    descriptor = os.open(path, os.O_RDONLY | links | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        content = file.read(min(found.st_size, longest) + 1)
    if len(content) > longest:
        raise ValueError(f"it is longer than {longest:,} bytes")
    return content


def check_header(path: Path) -> None:
    """The same for a file of tensors, whose header is parsed before anything else is known about it."""
    check_plain(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > _HEADER:
        raise ValueError(f"a header of {length:,} bytes")


def read_json(path: StorePath, longest: int = LONGEST, follow: bool = False) -> Any:
    """What a JSON file holds. A ValueError says what is wrong with it, an OSError that it cannot be read."""
    content = read_bounded(path, longest, follow)
    if content.count(b"[") + content.count(b"{") > _CONTAINERS:
        raise ValueError(f"it holds more than {_CONTAINERS:,} lists and objects")
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_settings(settings: dict[str, Any]) -> None:
    """Raise a ValueError if settings do not match the checksum among them."""
    if settings.get("checksum") != settings_checksum(settings):
        raise ValueError("its content does not match its checksum")


def checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def settings_checksum(settings: dict[str, Any]) -> str:
    rest = {name: value for name, value in settings.items() if name != "checksum"}
    return checksum(json.dumps(rest, sort_keys=True))
