"""How shards are written: the memory that they are computed in, and the disk that is waited for behind one's back.

Copying a shard into the system's cache keeps a processor busy. Beside a pass, whose threads wait for each other at
every operation, that costs several times what it takes: so it is done between passes, and only the disk is waited
for (or a store sent to) while the next shard is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from unde.pages import large
from unde.store.remote import StorePath
from unde.store.shards import begin_shard


class Behind:
    """At most one shard is on its way to the disk. Its error is raised by who comes next: the next write, or `wait`.

    Workers in other processes write in time (`at_once`): a job that they say is done is on the disk, and while one
    waits the others compute.
    """

    def __init__(self, at_once: bool = True) -> None:
        self.at_once = at_once
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._memory = torch.empty(0, 0)

    def memory(self, rows: int, width: int) -> Tensor:
        """(rows, width) float32, of any content, until the next shard is computed: asking the system for new memory
        takes longer than filling it."""
        if self._memory.shape[1] != width or len(self._memory) < rows:
            self._memory = torch.empty(0, 0)
            self._memory = large(rows, width)
        return self._memory[:rows]

    def write(self, path: StorePath, owner: str, tensors: Mapping[str, Tensor]) -> None:
        """A shard, as `write_shard` does it; the tensors may be overwritten when this returns."""
        self.wait()
        settle = begin_shard(path, owner, tensors)
        if self.at_once:
            settle()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "unde-writer")
        self._last = self._pool.submit(settle)

    def wait(self) -> None:
        """Until all is written."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Nobody writes any more; what went wrong is not told here."""
        pool, self._pool, self._last, self._memory = self._pool, None, None, torch.empty(0, 0)
        if pool is not None:
            pool.shutdown(wait=True)
