"""Executors by name, array jobs of a cluster, and jobs with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unde import console
from unde.errors import UndeError
from unde.parallel.base import Executor, Job, JobsFailed, Serial
from unde.parallel.processes import Processes
from unde.parallel.ray import Ray

# Environment variables of schedulers: (number of the worker, how many there are, first number).
_VARIABLES = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("PBS_ARRAY_INDEX", "PBS_ARRAY_COUNT", None),
    ("PBS_ARRAYID", "PBS_ARRAY_COUNT", None),
    ("RANK", "WORLD_SIZE", None),
    ("SLURM_PROCID", "SLURM_NTASKS", None),
)


@dataclass(unsafe_hash=True)
class Array(Serial):
    """One of many workers, each of which does its share of the jobs and ends; `unde finish` does what is left.

    Workers are counted from 0, or from 1: the last is then the same as number 0.
    """

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


def get_executor(
    executor: str | Executor,
    *,
    threads: int | None = None,
    workers: int | None = None,
    worker: str | None = None,
    gpus: float = 0,
    address: str | None = None,
    timeout: float | None = None,
) -> Executor:
    """The executor of a name and its options; an executor is returned as it is.

    >>> get_executor("processes:4")
    Processes(count=4, threads=1, timeout=None)
    >>> get_executor("array", worker="3/64")
    Array(threads=None, in_process=True, exclusive=False, worker=3, of=64)
    """
    if not isinstance(executor, str):
        return executor
    name, colon, after = executor.partition(":")
    workers = int(after) if after.isdigit() and name != "array" else workers
    if executor == "serial":
        return Serial(threads)
    if name == "array":
        return array_worker(after if colon else worker, workers, threads)
    if name == "processes" and workers is not None and (after.isdigit() or not colon):
        return Processes(workers, threads or 1, timeout)
    if name == "ray" and (after.isdigit() or not colon):
        return Ray(workers, threads or 1, gpus, address, timeout)
    raise UndeError(
        f"unknown executor {executor!r}: expected 'serial', 'processes:4', "
        "'array', 'array:3/64', 'ray', 'ray:8', or an Executor"
    )


@contextmanager
def close_workers(pending: str | Executor, executor: Executor) -> Generator[None]:
    """End the workers of an executor that was given by name; those of a user's executor stay."""
    try:
        yield
    finally:
        if isinstance(pending, str):
            executor.close()


def run_with_progress(
    executor: Executor,
    function: Callable[..., None],
    context: Any,
    jobs: Sequence[Job],
    title: str,
    *,
    describe: Callable[[Job], str] = "part {}".format,
    size: Callable[[Job], int] = lambda job: 1,
    unit: str = "parts",
) -> Iterator[Job]:
    """`executor.run` with a bar that counts the `size` of each job in `unit`; `describe` names a job in an error.

    >>> from unde.parallel import SERIAL
    >>> list(run_with_progress(SERIAL, lambda context, i: None, None, [(1,), (2,)], "counting"))
    [(1,), (2,)]
    """
    try:
        with console.progress(title, sum(map(size, jobs)), unit=unit) as advance:
            for job in executor.run(function, context, jobs):
                yield job
                advance(size(job))
    except JobsFailed as e:
        job, reason = next(iter(e.reasons.items()))
        raise UndeError(f"{title}: {describe(job)} failed again and again: {reason}") from None
