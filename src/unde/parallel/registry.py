"""Executors by their names."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from unde.errors import UndeError
from unde.parallel.array import this_worker
from unde.parallel.base import Executor
from unde.parallel.processes import Processes
from unde.parallel.ray import Ray
from unde.parallel.serial import Serial


def named(
    executor: str | Executor,
    *,
    threads: int | None = None,
    workers: int | None = None,
    worker: str | None = None,
    gpus: float = 0,
    address: str | None = None,
    timeout: float | None = None,
) -> Executor:
    """One by its name, with what was said about it; an executor is handed on as it is.

    >>> named("processes:4")
    Processes(count=4, threads=1, timeout=None)
    >>> named("array", worker="3/64")
    Array(threads=None, here=True, alone=False, worker=3, of=64)
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
        return this_worker(worker, workers, threads)
    if name == "ray":
        return Ray(workers, threads or 1, gpus, address, timeout)
    raise _unknown(executor)


@contextmanager
def ending(asked: str | Executor, executor: Executor) -> Generator[None]:
    """Workers that were started here end here; those of a user's own executor stay."""
    try:
        yield
    finally:
        if isinstance(asked, str):
            executor.close()


def _unknown(executor: str) -> UndeError:
    return UndeError(
        f"unknown executor {executor!r}: expected 'serial', 'processes:4', "
        "'array', 'array:3/64', 'ray', 'ray:8', or an Executor"
    )
