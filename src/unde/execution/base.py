"""What an executor is. A job is a pure function of a context and its number that writes files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

Job: TypeAlias = tuple[int, ...]
RETRIES = 2  # of a job that failed, before it is given up


class JobsFailed(Exception):
    """Some jobs failed for good; the others are done. `reasons` says why, by job."""

    def __init__(self, reasons: dict[Job, str]) -> None:
        super().__init__(f"{len(reasons)} jobs failed")
        self.reasons = reasons


class Executor(Protocol):
    @property
    def here(self) -> bool:
        """Whether jobs run in this process, on the very context that is given."""
        ...

    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> Iterator[Job]:
        """`function(context, *job)` for each of the jobs, which do not depend on one another; yields those done.

        Bad input (an `UndeError`) ends the run at once. What else fails is tried again, then left, and reported by
        `JobsFailed` when all others are done.
        """
        ...
