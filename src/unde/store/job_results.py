"""Files on their way from one process to another."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from unde.store.layout import SCRATCH
from unde.store.remote import Remote, StorePath
from unde.store.shards import read_shard, write_shard

_FORGOTTEN = 86_400.0  # seconds after which what a killed process left there is deleted


@contextmanager
def scratch(folder: StorePath) -> Generator[StorePath]:
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


def _remove(place: StorePath) -> None:
    if not isinstance(place, Remote):
        shutil.rmtree(place, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        for found in place.iterdir():
            found.unlink(missing_ok=True)


def _clear(place: StorePath) -> None:
    if isinstance(place, Remote):
        return  # a store has rules of its own for what is old
    for old in place.glob("*"):
        if time.time() - old.stat().st_mtime > _FORGOTTEN:
            shutil.rmtree(old, ignore_errors=True)


class Results:
    """What jobs found, by their numbers: in memory where they run in this process, else in files in `folder`."""

    def __init__(self, owner: str, folder: StorePath | None = None) -> None:
        self.owner, self.folder = owner, folder
        self._here: dict[tuple[int, ...], Mapping[str, Tensor]] = {}

    def put(self, job: tuple[int, ...], found: Mapping[str, Tensor]) -> None:
        if self.folder is None:
            self._here[job] = found
        else:
            write_shard(self._file(job), self.owner, found)

    def take(self, job: tuple[int, ...]) -> Mapping[str, Tensor]:
        """Once: it is not kept any longer."""
        if self.folder is None:
            return self._here.pop(job)
        found = read_shard(self._file(job), self.owner)
        self._file(job).unlink()  # what is mapped stays
        return found

    def _file(self, job: tuple[int, ...]) -> StorePath:
        assert self.folder is not None
        return self.folder / ("-".join(map(str, job)) + ".safetensors")
