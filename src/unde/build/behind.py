"""A shard is written while the next one is computed, by one thread; and the memory that shards are computed in."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class Behind:
    """At most one write is on its way. Its error is raised by whoever comes next: the next write, or `wait`.

    Workers in other processes write in time (`at_once`): a job that they say is done is on the disk, and while one
    writes the others compute.
    """

    def __init__(self, at_once: bool = True) -> None:
        self.at_once = at_once
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._memory: list[Tensor] = []  # of the next shard, and of the one that is being written

    def memory(self, rows: int, width: int) -> Tensor:
        """(rows, width) float32, of any content, for as long as one more shard is computed: asking the system for new
        memory takes longer than filling it."""
        if not self._memory or self._memory[0].shape[1] != width or len(self._memory[0]) < rows:
            self.wait()
            self._memory = [torch.empty(rows, width)]
        return self._memory[0][:rows]

    def write(self, function: Callable[..., None], *args: Any, keeps: bool) -> None:
        """Call it, now or meanwhile; `keeps` says that what it writes is still in `memory`."""
        self.wait()
        if self.at_once:
            function(*args)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "unde-writer")
        self._last = self._pool.submit(function, *args)
        if keeps:
            first = self._memory[0]
            self._memory = [*(self._memory[1:] or [torch.empty_like(first)]), first]

    def wait(self) -> None:
        """Until all is written."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Nobody writes any more; what went wrong is not told here."""
        pool, self._pool, self._last, self._memory = self._pool, None, None, []
        if pool is not None:
            pool.shutdown(wait=True)
