"""Executors of numbered jobs, and the pool of workers in other processes.

A job is a pure function of a context and its number that writes files. Workers start when there are jobs, load the
context once, and stay for the next run. A worker that dies is replaced and its job is retried; a job that takes longer
than `timeout` seconds counts as hung, and its worker is ended.
"""

from __future__ import annotations

import math
import pickle
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from unde import console
from unde.devices import count
from unde.errors import BadExample, UndeError, explain, require_positive

Job: TypeAlias = tuple[int, ...]
Message: TypeAlias = bytes | Job  # what a worker is sent: what to load, or a job
RETRIES = 2  # of a job that failed, before it is given up


class JobsFailed(Exception):
    """Some jobs failed for good, for `reasons`; the others are done."""

    def __init__(self, reasons: dict[Job, str]) -> None:
        super().__init__(f"{len(reasons)} jobs failed")
        self.reasons = reasons


class Executor(ABC):
    """Runs jobs; how many at a time and where is up to the subclass.

    Attributes:
        threads: Threads of torch for each job; None: those of this process.
        in_process: Whether jobs run in this process, on the context itself.
        exclusive: Whether no other process works on the same jobs, so that all are done when `run` ends.
    """

    threads: int | None
    in_process: bool
    exclusive: bool

    def sharing(self, device: torch.device, named: bool) -> int:
        """How many jobs may use this device at once; it was `named`, or is one of its kind."""
        return 1

    def owns(self, job: Job) -> bool:
        """Whether this executor is the one to do a job."""
        return True

    @abstractmethod
    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> Iterator[Job]:
        """Call `function(context, *job)` for independent jobs; yields each job that is done.

        Raises:
            UndeError: Bad input; ends the run at once.
            JobsFailed: Jobs that failed again after retries; raised when all others are done.
        """

    def close(self) -> None:  # noqa: B027
        """End idle workers; the next run starts new ones."""


@dataclass(unsafe_hash=True)
class Serial(Executor):
    """One job after the other, in this process; the first error ends the run.

    >>> list(Serial().run(lambda context, a, b: context.append(a + b), made := [], [(1, 2), (3, 4)]))
    [(1, 2), (3, 4)]
    >>> made
    [3, 7]
    """

    threads: int | None = None
    in_process: bool = True
    exclusive: bool = True

    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> Iterator[Job]:
        for job in jobs:
            function(context, *job)
            yield job


SERIAL = Serial()


Answer: TypeAlias = (
    tuple[bool, str] | None
)  # None: it went well; else whether it is bad input, and what happened


def pack_job(function: Callable[..., None], context: Any) -> bytes:
    """Pickle a function of jobs and its context for other processes."""
    message = (
        "what other processes are to run cannot be sent to them ({e}): functions must be at the top level of a "
        "module (or functools.partial of one). Move them there, or run in one process"
    )
    with explain(message, Exception):
        return pickle.dumps((function, context))


class JobRunner:
    """Worker side of a pool: given bytes, load a pickled function and context; given a job, run it on them.

    A context with a `close` method is closed before the next is loaded.
    """

    def __init__(self) -> None:
        self._loaded: tuple[Callable[..., None], Any] | None = None

    def __call__(self, message: Message) -> Answer:
        try:
            if isinstance(message, bytes):
                self._load(message)
            else:
                assert self._loaded is not None
                function, context = self._loaded
                function(context, *message)
        except UndeError as e:
            # A store that does not answer may do so the next time, and other jobs have other examples.
            return not isinstance(e, (OSError, BadExample)), str(e)
        except Exception:
            return False, traceback.format_exc().strip()
        return None

    def _load(self, payload: bytes) -> None:
        if self._loaded is not None and hasattr(self._loaded[1], "close"):
            self._loaded[1].close()
        self._loaded = None  # its memory is free for the next
        self._loaded = pickle.loads(payload)


STARTS = 10  # workers that may die in a row before one has begun to work
_STARTING: Job = ()
Worker = TypeVar("Worker")


@dataclass(frozen=True)
class WorkerExit:
    """End of a worker: why, and whether a new worker would end the same way (`fatal`)."""

    reason: str
    fatal: bool = False


class WorkerPool(Executor, Generic[Worker]):
    """An executor with workers; subclasses start them, send messages and receive answers."""

    in_process, exclusive = False, True

    def __init__(self, count: int, threads: int, timeout: float | None) -> None:
        require_positive(workers=count, threads=threads)
        if timeout is not None and not timeout > 0:
            raise UndeError(f"a timeout of {timeout} s: expected more than 0, or None to wait for ever")
        self.count, self.threads, self.timeout = count, threads, timeout
        self.workers: list[Worker] = []

    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> Iterator[Job]:
        if not jobs:
            return
        payload = pack_job(function, context)
        try:
            yield from _PoolRun(self, payload, jobs).run()
        except BaseException:  # also when the caller stops early: running jobs are not wanted either
            self.close()
            raise

    def sharing(self, device: torch.device, named: bool) -> int:
        return self.count if named else -(-self.count // max(1, count(device.type)))

    def close(self) -> None:
        while self.workers:
            self.end(self.workers.pop())

    @abstractmethod
    def start(self) -> Worker: ...

    @abstractmethod
    def send(self, worker: Worker, message: Message) -> None:
        """Send bytes to load, or a job to run. A dead worker is noticed in `receive`."""
        ...

    @abstractmethod
    def receive(
        self, workers: Sequence[Worker], seconds: float | None
    ) -> Sequence[tuple[Worker, Answer | WorkerExit]]:
        """Wait for an answer or until the time is over; returns all answers."""
        ...

    @abstractmethod
    def end(self, worker: Worker) -> WorkerExit:
        """End a worker at once."""
        ...


class _PoolRun(Generic[Worker]):
    """State of one run of jobs."""

    def __init__(self, pool: WorkerPool[Worker], payload: bytes, jobs: Sequence[Job]) -> None:
        self._pool, self._payload = pool, payload
        self._waiting = deque(jobs)
        self._busy: dict[Worker, Job] = {}  # the job of each worker
        self._since: dict[Worker, float] = {}
        self._idle: list[Worker] = []  # no job left for them, so far
        self._attempts: Counter[Job] = Counter()
        self._failed: dict[Job, str] = {}

    def run(self) -> Iterator[Job]:
        wanted = min(self._pool.count, len(self._waiting))  # idle ones first
        for worker in self._pool.workers[:wanted]:
            self._send(worker, _STARTING)
        while len(self._busy) < wanted:
            self._add_worker()
        timeout = self._pool.timeout
        pause = None if timeout is None else min(1.0, timeout)
        while self._waiting or any(job != _STARTING for job in self._busy.values()):
            answers = self._pool.receive(list(self._busy), pause)
            for worker in (worker for worker, answer in answers if isinstance(answer, WorkerExit)):
                self._pool.workers.remove(worker)
            for worker, answer in answers:
                job = self._busy.pop(worker)
                if isinstance(answer, WorkerExit):
                    self._handle_exit(job, answer)
                    continue
                if answer is not None:
                    refused, reason = answer
                    if refused or job == _STARTING:
                        what = "" if refused else "a worker process could not make what it is to work on: "
                        raise UndeError(what + reason)
                    self._retry(job, reason)
                elif job == _STARTING:
                    self._attempts[_STARTING] = 0
                else:
                    yield job
                self._assign(worker)
            self._end_hung()
        for worker in self._busy:  # still starting, and not needed any more
            self._pool.workers.remove(worker)
            self._pool.end(worker)
        if self._failed:
            raise JobsFailed(self._failed)

    def _add_worker(self) -> None:
        worker = self._pool.start()
        self._pool.workers.append(worker)
        self._send(worker, _STARTING)

    def _send(self, worker: Worker, job: Job) -> None:
        self._busy[worker], self._since[worker] = job, time.monotonic()
        self._pool.send(worker, self._payload if job == _STARTING else job)

    def _assign(self, worker: Worker) -> None:
        if self._waiting:
            self._send(worker, self._waiting.popleft())
        else:
            self._idle.append(worker)

    def _reassign(self) -> None:
        """Give the job of a dead worker to an idle one, else to a new one: beside idle ones it may find no room."""
        if self._waiting and self._idle:
            self._assign(self._idle.pop())
        elif self._waiting:
            self._add_worker()

    def _retry(self, job: Job, reason: str) -> None:
        """Queue a failed job again, or give it up."""
        self._attempts[job] += 1
        if self._attempts[job] <= RETRIES:
            self._waiting.append(job)
        else:
            self._failed[job] = reason

    def _handle_exit(self, job: Job, outcome: WorkerExit) -> None:
        """Retry the job of a dead worker, unless it has killed too many."""
        if job == _STARTING:
            self._attempts[_STARTING] += 1
            if outcome.fatal or self._attempts[_STARTING] == STARTS:
                who = (
                    "a worker"
                    if outcome.fatal
                    else f"{STARTS} workers in a row did not get to work: the last"
                )
                raise UndeError(f"{who} {outcome.reason}")
        else:
            self._retry(job, f"{RETRIES + 1} workers died of it: the last {outcome.reason}")
            if job not in self._failed:
                console.note(f"a worker {outcome.reason}. Another one takes over, and nothing is lost")
        self._reassign()

    def _end_hung(self) -> None:
        limit = math.inf if self._pool.timeout is None else self._pool.timeout
        for worker, job in list(self._busy.items()):
            if job != _STARTING and time.monotonic() - self._since[worker] > limit:
                del self._busy[worker]
                self._pool.workers.remove(worker)
                self._pool.end(worker)
                self._retry(job, f"it took longer than {limit:g} s, {RETRIES + 1} times")
                self._reassign()


def describe_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (signal 9), often a sign of too little memory: try fewer workers"
    return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
