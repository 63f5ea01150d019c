"""Files on their way from one process to another."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from unde.store.layout import SCRATCH
from unde.store.remote import Place, Remote

_FORGOTTEN = 86_400.0  # seconds after which what a killed process left there is deleted


@contextmanager
def scratch(folder: Place) -> Generator[Place]:
    """A place in the folder of an index, which all workers see, gone afterwards; where that cannot be written, one on
    this machine."""
    try:
        _clear(folder / SCRATCH)
        made = folder / SCRATCH / secrets.token_hex(8)
        made.mkdir(parents=True)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="unde-") as temporary:
            yield Path(temporary)
        return
    try:
        yield made
    finally:
        _remove(made)
        with contextlib.suppress(OSError):
            made.parent.rmdir()  # unless others are at work there


def _remove(place: Place) -> None:
    if not isinstance(place, Remote):
        shutil.rmtree(place, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        for found in place.iterdir():
            found.unlink(missing_ok=True)


def _clear(place: Place) -> None:
    if isinstance(place, Remote):
        return  # a store has rules of its own for what is old
    for old in place.glob("*"):
        if time.time() - old.stat().st_mtime > _FORGOTTEN:
            shutil.rmtree(old, ignore_errors=True)
