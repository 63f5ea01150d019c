"""What an executor is. A job is a pure function of a context and its number that writes files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Job = tuple[int, ...]


class Executor(Protocol):
    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> None:
        """`function(context, *job)` for each of the jobs, which do not depend on one another; raises if one failed."""
        ...
