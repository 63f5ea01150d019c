"""Executors by name, and jobs with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from unde import console
from unde.errors import UndeError
from unde.parallel.array import array_worker
from unde.parallel.base import Executor, Job, JobsFailed, Serial
from unde.parallel.processes import Processes
from unde.parallel.ray import Ray


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
    if name in ("processes", "ray") and colon and after.isdigit():
        workers = int(after)
    elif name == "array" and colon:
        worker = after
    elif colon:
        raise _unknown(executor)
    if name == "serial":
        return Serial(threads)
    if name == "processes" and workers is not None:
        return Processes(workers, threads or 1, timeout)
    if name == "array":
        return array_worker(worker, workers, threads)
    if name == "ray":
        return Ray(workers, threads or 1, gpus, address, timeout)
    raise _unknown(executor)


@contextmanager
def close_workers(pending: str | Executor, executor: Executor) -> Generator[None]:
    """End the workers of an executor that was given by name; those of a user's executor stay."""
    try:
        yield
    finally:
        if isinstance(pending, str):
            executor.close()


def _unknown(executor: str) -> UndeError:
    return UndeError(
        f"unknown executor {executor!r}: expected 'serial', 'processes:4', "
        "'array', 'array:3/64', 'ray', 'ray:8', or an Executor"
    )


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
