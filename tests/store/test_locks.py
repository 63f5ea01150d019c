"""Locks of folders by the functions of Windows, which a stand-in replaces here."""

import errno
import sys
from types import SimpleNamespace

import pytest

from unde import UndeError
from unde.store import locks


def test_locks_of_windows(tmp_path, monkeypatch):
    held = set()

    def locking(descriptor: int, mode: str, count: int) -> None:
        key = (locks.os.fstat(descriptor).st_ino, locks.os.lseek(descriptor, 0, locks.os.SEEK_CUR))
        if mode == "unlock":
            held.remove(key)
        elif key in held:
            raise PermissionError(errno.EACCES, "Permission denied")
        else:
            held.add(key)

    windows = SimpleNamespace(LK_NBLCK="lock", LK_UNLCK="unlock", locking=locking)
    monkeypatch.setattr(locks, "msvcrt", windows, raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    with locks.locked(tmp_path):
        assert [offset for _, offset in held] == [2**30]
        with pytest.raises(UndeError, match="another process is building"), locks.locked(tmp_path):
            pass
    assert not held
    assert (tmp_path / ".lock").stat().st_size < 100
