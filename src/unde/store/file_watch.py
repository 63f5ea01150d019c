"""Files that stay what they were found to be while they are used.

Shards are mapped, not read: that costs no copy, but a mapped file that somebody cuts short ends the process (SIGBUS),
and zeros that somebody writes into it go into the scores. We ourselves never change a file, only replace it, which
leaves mapped ones as they are. Against the damage that others do:

- While a block of a mapped file is used, the file is under a read lease: who opens it for writing or cuts it waits
  until the block was used, for up to 45 seconds (/proc/sys/fs/lease-break-time). Linux has leases, on local disks, for
  the owner of a file; elsewhere the moments in which a block is used are not covered. What is held on to for longer is
  copied, but for blocks, which are looked at and put under a lease each time they are used.
- A `Watch` notes size, times and inode of files that were found whole. One that is read again is trusted if it still
  has them, at the cost of a look; else its content is compared with its checksum once more.

So a file that is damaged before, between or during uses is an error, never a number; where there are no leases, unless
it is damaged in the very moment in which it is used.
"""

from __future__ import annotations

import contextlib
import os
import signal
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from unde.store.remote import Remote, StorePath

Stamp = tuple[int, int, int, int, int]


class Hold:
    """A read lease on a file, until what was mapped from it is gone; nothing where there are none."""

    def __init__(self, path: StorePath) -> None:
        self._file: int | None = None
        self._process = os.getpid()
        with contextlib.suppress(OSError, ImportError, AttributeError):
            if isinstance(path, Remote):
                return
            import fcntl

            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            fcntl.fcntl(
                self._file, fcntl.F_SETSIG, signal.SIGURG
            )  # ignored by default, where SIGIO would kill
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_RDLCK)

    def until_gone(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            weakref.finalize(t.untyped_storage(), self._let_one_go).atexit = False

    def _let_one_go(self) -> None:
        """The bound method is what keeps the lease: with the last tensor it goes, and the file is closed."""

    def __del__(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError, ImportError, AttributeError):
            import fcntl

            if (
                os.getpid() == self._process
            ):  # forked processes have the file open too, and end when they like
                fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(self._file)


class Held(list[Tensor]):
    """Tensors that stay mapped, under leases for as long as this list of them is used."""

    def __init__(self, tensors: Iterable[Tensor], leases: list[Hold]) -> None:
        super().__init__(tensors)
        self._leases = leases


class Watch:
    """What files looked like when they were found whole."""

    def __init__(self) -> None:
        self._seen: dict[Path, Stamp] = {}

    def note(self, paths: Iterable[StorePath]) -> None:
        """Files that were found whole just now."""
        for path in paths:
            if not isinstance(path, Remote):
                with contextlib.suppress(OSError):
                    self._seen[path] = _stamp(path)

    def changed(self, path: StorePath) -> bool:
        """Whether a file is not what it was when it was noted; one that was not, is now. Objects do not change: copies
        of them are checked when they are made."""
        if isinstance(path, Remote):
            return False
        try:
            stamp = _stamp(path)
        except OSError:
            return True
        return self._seen.setdefault(path, stamp) != stamp


def copied(mapped: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that do not depend on the file that they were mapped from; one by one, that of `mapped` being gone."""
    left = dict(mapped)
    return {name: left.pop(name).clone() for name in list(left)}


def _stamp(path: Path) -> Stamp:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
