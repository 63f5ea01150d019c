"""Numbered jobs in this process or in several, none of which outlives its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import TypeAlias, cast

import torch

from unde.errors import UndeError

Job: TypeAlias = Callable[[int], None]
DEATHS = 3  # of processes at the same job, until that is taken to be the reason
_UNGUARDED = (
    "a worker process ended with code {code} while starting; its own message is above. A script that starts "
    "processes must do so under `if __name__ == '__main__':`, and its functions must be in a file that can be "
    "imported. Or pass processes=1"
)


class JobFailed(Exception):
    """Job `number` raised, or processes died of it; `number` is None if they never got to work."""

    def __init__(self, number: int | None, reason: str) -> None:
        super().__init__(reason)
        self.number, self.reason = number, reason


def finished(job: Job, numbers: Iterable[int], processes: int, threads: int) -> Generator[int, None, None]:
    """Runs the job on every number and yields the numbers as they finish. Close it to stop all processes.

    Each job has `threads` torch threads, however many processes there are: summation order, and with it the
    last bits of a result, may depend on the number of threads.
    """
    if processes == 1:
        yield from _here(job, numbers, threads)
    else:
        with closing(_Workers(job, list(numbers), processes, threads)) as workers:
            yield from workers.finished()


def _here(job: Job, numbers: Iterable[int], threads: int) -> Iterator[int]:
    before = torch.get_num_threads()
    try:
        for number in numbers:
            torch.set_num_threads(threads)
            try:
                job(number)
            except Exception as error:
                raise JobFailed(number, f"{type(error).__name__}: {error}") from error
            yield number
    finally:
        torch.set_num_threads(before)


class _Workers:
    """Spawned processes that ask for a number, do the job, and ask again. One that is killed is replaced."""

    def __init__(self, job: Job, numbers: list[int], processes: int, threads: int) -> None:
        _check_importable(job)
        self._job, self._threads = job, threads
        self._waiting = deque(numbers)
        self._busy: dict[Connection, int | None] = {}  # None while a worker starts up
        self._processes: dict[Connection, BaseProcess] = {}
        self._deaths: Counter[int | None] = Counter()  # of each number; of None: while starting, in a row
        try:
            for _ in range(min(processes, len(numbers))):
                self._start()
        except BaseException:
            self.close()
            raise

    def finished(self) -> Iterator[int]:
        while self._busy:
            for connection in cast(list[Connection], wait(list(self._busy))):
                number = self._busy.pop(connection)
                try:
                    failure = connection.recv()
                except (EOFError, OSError):
                    self._replace(connection, number)
                    continue
                if failure is not None:
                    raise JobFailed(number, failure)
                self._deaths[None] = 0
                self._send_next(connection)
                if number is not None:
                    yield number

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for connection in list(self._processes):
            self._end(connection)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process that used torch may hang
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._job, self._threads))
        process.start()
        theirs.close()
        self._busy[ours], self._processes[ours] = None, process

    def _send_next(self, connection: Connection) -> None:
        if self._waiting:
            self._busy[connection] = self._waiting.popleft()
            with suppress(ConnectionError):  # it died meanwhile: heard of in the next round
                connection.send(self._busy[connection])

    def _replace(self, connection: Connection, number: int | None) -> None:
        """After a worker has died: another takes over what it had, unless that has killed too many."""
        code = self._end(connection)
        self._deaths[number] += 1
        if number is None and code >= 0:
            raise JobFailed(None, _UNGUARDED.format(code=code))
        if self._deaths[number] == DEATHS:
            memory = (
                ", often a sign of too little memory: try fewer processes" if code == -signal.SIGKILL else ""
            )
            whose = "worker processes ended while starting" if number is None else "its process ended"
            raise JobFailed(number, f"{whose} {DEATHS} times, at last with code {code}{memory}")
        if number is not None:
            self._waiting.appendleft(number)
        if self._waiting:
            self._start()

    def _end(self, connection: Connection) -> int:
        """Its exit code, once the process has ended by itself or by force."""
        process = self._processes.pop(connection)
        process.join(timeout=5)
        process.kill()  # for user code that ignores the polite signal
        process.join()
        connection.close()
        return process.exitcode or 0


def _serve(connection: Connection, job: Job, threads: int) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends the workers
    torch.set_num_threads(threads)
    failure: str | None = None
    try:
        while True:
            connection.send(failure)
            number = connection.recv()
            try:
                job(number)
                failure = None
            except Exception:
                failure = traceback.format_exc().strip()
    except (EOFError, BrokenPipeError):
        pass


def _exit_with_parent() -> None:
    """Even a parent that was killed leaves no process behind that trains on for nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _check_importable(job: Job) -> None:
    try:
        ForkingPickler.dumps(job)
    except Exception as error:
        raise UndeError(
            f"with more than one process, train and utility must be functions at the top level of a module "
            f"(or functools.partial of one), so that other processes can import them: {error}. "
            "Move them there, or pass processes=1"
        ) from error
