"""Jobs in several processes of this machine, none of which outlives its parent.

Workers are spawned, make the context once and ask for one job after the other. One that dies is replaced, and its
job is given to another; a job that takes longer than `timeout` seconds is taken for hung, and its worker is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch

from unde.errors import UndeError
from unde.execution.base import RETRIES, Job, JobsFailed

STARTS = 10  # workers that may die in a row before one has begun to work
_STARTING: Job = ()
_UNGUARDED = (
    "a worker process ended with code {code} while starting; its own message is above. A script that starts "
    "processes must do so under `if __name__ == '__main__':`, and its functions must be in a file that can be imported"
)


@dataclass(frozen=True)
class Processes:
    """`threads` are those of torch in each worker while it runs a job that does not set its own."""

    count: int
    threads: int = 1
    timeout: float | None = None
    here: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UndeError(f"{self.count} processes: expected at least one")

    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> Iterator[Job]:
        if not jobs:
            return
        sent = _sendable(function, context)
        with closing(_Workers(self, sent, jobs)) as workers:
            yield from workers.done()


def _sendable(function: Callable[..., None], context: Any) -> bytes:
    try:
        return pickle.dumps(partial(_call, function, context))
    except UndeError:
        raise
    except Exception as e:
        raise UndeError(
            f"what other processes are to run cannot be sent to them ({e}): functions must be at the top level of a "
            "module (or functools.partial of one). Move them there, or run in one process"
        ) from e


def _call(function: Callable[..., None], context: Any, job: Job) -> None:
    function(context, *job)


class _Workers:
    def __init__(self, how: Processes, call: bytes, jobs: Sequence[Job]) -> None:
        self._how, self._call = how, call
        self._waiting = deque(jobs)
        self._busy: dict[Connection, Job] = {}  # what each worker is at
        self._since: dict[Connection, float] = {}
        self._processes: dict[Connection, BaseProcess] = {}
        self._tried: Counter[Job] = Counter()
        self._failed: dict[Job, str] = {}
        try:
            for _ in range(min(how.count, len(jobs))):
                self._start()
        except BaseException:
            self.close()
            raise

    def done(self) -> Iterator[Job]:
        while self._busy:
            for connection in cast(list[Connection], wait(list(self._busy), timeout=self._patience())):
                job = self._busy.pop(connection)
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    self._died(connection, job)
                    continue
                if answer is not None:
                    self._failed_at(job, *answer)
                elif job == _STARTING:
                    self._tried[_STARTING] = 0
                else:
                    yield job
                self._give(connection)
            self._end_hung()
        if self._failed:
            raise JobsFailed(self._failed)

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for connection in list(self._processes):
            self._end(connection)

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork of a process that used torch may hang
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(theirs, self._call, self._how.threads))
        process.start()
        theirs.close()
        self._processes[ours] = process
        self._at(ours, _STARTING)

    def _at(self, connection: Connection, job: Job) -> None:
        self._busy[connection], self._since[connection] = job, time.monotonic()

    def _give(self, connection: Connection) -> None:
        if self._waiting:
            self._at(connection, self._waiting.popleft())
            with suppress(ConnectionError):  # it died meanwhile: heard of in the next round
                connection.send(self._busy[connection])

    def _failed_at(self, job: Job, refused: bool, reason: str) -> None:
        if refused:
            raise UndeError(reason)
        if job == _STARTING:
            raise UndeError(f"a worker process could not make what it is to work on: {reason}")
        self._again(job, reason)

    def _again(self, job: Job, reason: str) -> None:
        """A job that failed is tried again, or given up."""
        self._tried[job] += 1
        if self._tried[job] <= RETRIES:
            self._waiting.append(job)
        else:
            self._failed[job] = reason

    def _died(self, connection: Connection, job: Job) -> None:
        """After a worker has died: another takes over what it had, unless that has killed too many."""
        code = self._end(connection)
        memory = ", often a sign of too little memory: try fewer processes" if code == -signal.SIGKILL else ""
        if job == _STARTING:
            self._tried[_STARTING] += 1
            if code >= 0:
                raise UndeError(_UNGUARDED.format(code=code))
            if self._tried[_STARTING] == STARTS:
                raise UndeError(
                    f"worker processes ended while starting {STARTS} times in a row, at last with code {code}{memory}"
                )
        else:
            self._again(job, f"its process ended {RETRIES + 1} times, at last with code {code}{memory}")
        if self._waiting:
            self._start()

    def _patience(self) -> float | None:
        return None if self._how.timeout is None else min(1.0, self._how.timeout)

    def _end_hung(self) -> None:
        if self._how.timeout is None:
            return
        for connection, job in list(self._busy.items()):
            if job != _STARTING and time.monotonic() - self._since[connection] > self._how.timeout:
                del self._busy[connection]
                self._processes[connection].kill()
                self._end(connection)
                self._again(job, f"it took longer than {self._how.timeout:g} s, {RETRIES + 1} times")
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


def _serve(connection: Connection, sent: bytes, threads: int) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends the workers
    torch.set_num_threads(threads)
    made: list[Callable[[Job], None]] = []
    answer = _answered(lambda: made.append(pickle.loads(sent)))
    try:
        while True:
            connection.send(answer)
            job = connection.recv()
            answer = _answered(lambda job=job: made[0](job))
    except (EOFError, BrokenPipeError):
        pass


def _answered(run: Callable[[], None]) -> tuple[bool, str] | None:
    """None if it went well, else whether it is bad input, and what happened."""
    try:
        run()
    except UndeError as e:
        return True, str(e)
    except Exception:
        return False, traceback.format_exc().strip()
    return None


def _exit_with_parent() -> None:
    """Even a parent that was killed leaves no process behind that works on for nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
