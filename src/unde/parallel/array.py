"""Array jobs of a cluster: one of many workers, each of which does its share of the jobs and ends.

When all have ended, `unde finish` does what is left and checks all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unde.errors import UndeError
from unde.parallel.base import Job, Serial

# Environment variables of schedulers: (number of the worker, how many there are, first number).
_VARIABLES = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("PBS_ARRAY_INDEX", "PBS_ARRAY_COUNT", None),
    ("PBS_ARRAYID", "PBS_ARRAY_COUNT", None),
    ("RANK", "WORLD_SIZE", None),
    ("SLURM_PROCID", "SLURM_NTASKS", None),
)


@dataclass(frozen=True)
class Array(Serial):
    """Worker number `worker` of `of`, counted from 0, or from 1: the last is then the same as number 0."""

    worker: int = 0
    of: int = 1
    exclusive: bool = False

    def __post_init__(self) -> None:
        if self.of < 1 or not 0 <= self.worker <= self.of:
            raise UndeError(
                f"worker {self.worker}/{self.of}: expected a number from 0 or 1 on, of at least one worker, "
                "such as 3/64"
            )

    def owns(self, job: Job) -> bool:
        """
        >>> [s for s in range(10) if Array(worker=3, of=4).owns((0, s))]
        [3, 7]
        """
        return sum(job) % self.of == self.worker % self.of


def array_worker(
    position: str | None,
    workers: int | None,
    threads: int | None = None,
    variables: Mapping[str, str] = os.environ,
) -> Array:
    """The worker at `position` ("3/64"), or that of the scheduler's environment variables.

    >>> array_worker(None, None, variables={"SLURM_ARRAY_TASK_ID": "12", "SLURM_ARRAY_TASK_COUNT": "64"})
    Array(threads=None, in_process=True, exclusive=False, worker=12, of=64)
    """
    if position is not None:
        number, slash, of = position.partition("/")
        if not (slash and number.isdigit() and of.isdigit()):
            raise UndeError(f"worker {position!r}: expected its number and how many there are, such as 3/64")
        return Array(threads, worker=int(number), of=int(of))
    for number, count, first in _VARIABLES:
        if number in variables and (count in variables or workers is not None):
            of = workers or int(variables[count])
            start = int(variables.get(first, 0)) if first else 0
            return Array(threads, worker=(int(variables[number]) - start) % of, of=of)
    raise UndeError(
        "which worker is this? Neither SLURM, PBS nor torchrun say so here: give its number and how many there are, "
        "such as --worker 3/64 (or Array(worker=3, of=64))"
    )
