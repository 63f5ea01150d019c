"""Executors by their names."""

from __future__ import annotations

from unde.errors import UndeError
from unde.execution.base import Executor
from unde.execution.processes import Processes
from unde.execution.serial import Serial


def named(executor: str | Executor, threads: int = 1) -> Executor:
    """
    >>> named("processes:4")
    Processes(count=4, threads=1, timeout=None, here=False)
    """
    if not isinstance(executor, str):
        return executor
    name, _, count = executor.partition(":")
    if name == "serial" and not count:
        return Serial()
    if name == "processes" and count.isdigit():
        return Processes(int(count), threads)
    raise UndeError(f"unknown executor {executor!r}: expected 'serial', 'processes:4', or an Executor")
