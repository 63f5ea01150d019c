"""One job after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unde.parallel.base import Job


@dataclass(frozen=True)
class Serial:
    """Errors are those of the job itself: nothing else is tried after one.

    >>> list(Serial().run(lambda context, a, b: context.append(a + b), made := [], [(1, 2), (3, 4)]))
    [(1, 2), (3, 4)]
    >>> made
    [3, 7]
    """

    threads: int | None = None
    here: bool = True
    alone: bool = True

    def mine(self, job: Job) -> bool:
        return True

    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> Iterator[Job]:
        for job in jobs:
            function(context, *job)
            yield job

    def close(self) -> None:
        pass


SERIAL = Serial()
