"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PARTIAL = ".partial"  # what a kill can leave behind ends in this, is never read, and is overwritten next time


def write_atomically(path: Path, content: bytes) -> None:
    """All of the file or none of it, also after a kill or a power cut; an error leaves the old file."""
    temporary = path.with_name(path.name + PARTIAL)
    try:
        with open(temporary, "wb") as file:
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
