"""Results that one process hands to another, in files or in memory."""

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

from unde.store.cache import delete_folder
from unde.store.layout import SCRATCH
from unde.store.remote import StorePath, is_local
from unde.store.shards import read_shard, write_shard

_ABANDONED = 86_400.0  # seconds after which files of a killed process are deleted


@contextmanager
def scratch(folder: StorePath) -> Generator[StorePath]:
    """A temporary folder in that of an index, which all workers see; a local one if the index cannot be written."""
    try:
        _clear(folder / SCRATCH)
        shared = folder / SCRATCH / secrets.token_hex(8)
        shared.mkdir(parents=True)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="unde-") as temporary:
            yield Path(temporary)
        return
    try:
        yield shared
    finally:
        with contextlib.suppress(OSError):
            delete_folder(shared)
        with contextlib.suppress(OSError):
            shared.parent.rmdir()  # unless other processes use it


def _clear(folder: StorePath) -> None:
    """Delete what killed processes left in a local folder; object stores expire old objects by their own rules."""
    for old in folder.glob("*") if is_local(folder) else ():
        if time.time() - old.stat().st_mtime > _ABANDONED:
            shutil.rmtree(old, ignore_errors=True)


class Results:
    """Results of jobs by number: in memory if `folder` is None, else in files."""

    def __init__(self, owner: str, folder: StorePath | None = None) -> None:
        self.owner, self.folder = owner, folder
        self._memory: dict[tuple[int, ...], Mapping[str, Tensor]] = {}

    def put(self, job: tuple[int, ...], result: Mapping[str, Tensor]) -> None:
        if self.folder is None:
            self._memory[job] = result
        else:
            write_shard(self._file(job), self.owner, result)

    def take(self, job: tuple[int, ...]) -> Mapping[str, Tensor]:
        """Return a result and delete it."""
        if self.folder is None:
            return self._memory.pop(job)
        result = read_shard(self._file(job), self.owner)
        self._file(job).unlink()  # mapped tensors stay valid
        return result

    def _file(self, job: tuple[int, ...]) -> StorePath:
        assert self.folder is not None
        return self.folder / ("-".join(map(str, job)) + ".safetensors")
