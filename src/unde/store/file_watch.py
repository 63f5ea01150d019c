"""Detect files that other programs change while an index is open.

Shards are mapped, not read. Size, times and inode of a verified file are recorded; a file that still has them is
trusted, otherwise its checksum is compared again. Tensors that outlive one use are copied, blocks of features apart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from unde.store.remote import Remote, StorePath

Stamp = tuple[int, int, int, int, int]


class FileWatch:
    """Stamps of verified files."""

    def __init__(self) -> None:
        self._stamps: dict[Path, Stamp] = {}

    def record(self, paths: Iterable[StorePath]) -> None:
        """Record files that were verified just now."""
        for path in paths:
            if not isinstance(path, Remote):
                with contextlib.suppress(OSError):
                    self._stamps[path] = _stamp(path)

    def changed(self, path: StorePath) -> bool:
        """Whether a file differs from its record; records it if it has none. Copies of objects are verified when they
        are made, so remote paths never change."""
        if isinstance(path, Remote):
            return False
        try:
            stamp = _stamp(path)
        except OSError:
            return True
        return self._stamps.setdefault(path, stamp) != stamp


def copy_tensors(mapped: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors one by one, so that they do not depend on the file they were mapped from."""
    left = dict(mapped)
    return {name: left.pop(name).clone() for name in list(left)}


def _stamp(path: Path) -> Stamp:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
