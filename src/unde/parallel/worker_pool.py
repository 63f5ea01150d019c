"""Workers in other processes, here or on other machines: who has which job, and what happens when one dies.

They are started when there are jobs, make the context once, ask for one job after the other, and stay for the next
run. One that dies is replaced, and its job is given to another; a job that takes longer than `timeout` seconds is
taken for hung, and its worker is ended.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from unde.errors import UndeError
from unde.parallel.base import RETRIES, Answer, Job, JobsFailed, packed

STARTS = 10  # workers that may die in a row before one has begun to work
_STARTING: Job = ()
Worker = TypeVar("Worker")
Message = bytes | Job


@dataclass(frozen=True)
class Gone:
    """A worker that ended, and how: a sentence, and whether another could fare better."""

    how: str
    hopeless: bool = False


class Crew(ABC, Generic[Worker]):
    """An executor with workers. How they are started, sent messages and heard is left open."""

    here, alone = False, True

    def __init__(self, count: int, threads: int, timeout: float | None) -> None:
        for what, value in (("workers", count), ("threads", threads)):
            if value < 1:
                raise UndeError(f"{value} {what}: expected at least one")
        if timeout is not None and not timeout > 0:
            raise UndeError(f"a timeout of {timeout} s: expected more than 0, or None to wait for ever")
        self.count, self.threads, self.timeout = count, threads, timeout
        self._all: list[Worker] = []

    def mine(self, job: Job) -> bool:
        return True

    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> Iterator[Job]:
        if not jobs:
            return
        sent = packed(function, context)
        try:
            yield from _Run(self, sent, jobs).done()
        except BaseException:  # also when nobody wants the rest: what workers are at is not wanted either
            self.close()
            raise

    def close(self) -> None:
        while self._all:
            self.end(self._all.pop())

    @abstractmethod
    def start(self) -> Worker: ...

    @abstractmethod
    def send(self, worker: Worker, message: Message) -> None:
        """Bytes to `take`, or a job to `do`. That a worker is dead may go unnoticed: it is heard of."""
        ...

    @abstractmethod
    def hear(
        self, workers: Sequence[Worker], seconds: float | None
    ) -> Sequence[tuple[Worker, Answer | Gone]]:
        """Answers that are there, once there is one or the time is over."""
        ...

    @abstractmethod
    def end(self, worker: Worker) -> Gone:
        """At once, whatever it is at."""
        ...


class _Run(Generic[Worker]):
    """One set of jobs."""

    def __init__(self, crew: Crew[Worker], sent: bytes, jobs: Sequence[Job]) -> None:
        self._crew, self._sent = crew, sent
        self._waiting = deque(jobs)
        self._busy: dict[Worker, Job] = {}  # what each worker is at
        self._since: dict[Worker, float] = {}
        self._idle: list[Worker] = []  # those that found nothing left to do, yet
        self._tried: Counter[Job] = Counter()
        self._failed: dict[Job, str] = {}

    def done(self) -> Iterator[Job]:
        self._hire()
        while self._waiting or any(job != _STARTING for job in self._busy.values()):
            heard = self._crew.hear(list(self._busy), self._patience())
            for worker in (worker for worker, answer in heard if isinstance(answer, Gone)):
                self._crew._all.remove(worker)
            for worker, answer in heard:
                job = self._busy.pop(worker)
                if isinstance(answer, Gone):
                    self._lost(job, answer)
                    continue
                if answer is not None:
                    self._failed_at(job, *answer)
                elif job == _STARTING:
                    self._tried[_STARTING] = 0
                else:
                    yield job
                self._give(worker)
            self._end_hung()
        for worker in self._busy:  # still starting, and not needed any more
            self._crew._all.remove(worker)
            self._crew.end(worker)
        if self._failed:
            raise JobsFailed(self._failed)

    def _hire(self) -> None:
        """As many workers as there is work for, first those that are there."""
        wanted = min(self._crew.count, len(self._waiting))
        for worker in self._crew._all[:wanted]:
            self._begin(worker)
        while len(self._busy) < wanted:
            self._replace()

    def _replace(self) -> None:
        worker = self._crew.start()
        self._crew._all.append(worker)
        self._begin(worker)

    def _begin(self, worker: Worker) -> None:
        self._at(worker, _STARTING)
        self._crew.send(worker, self._sent)

    def _at(self, worker: Worker, job: Job) -> None:
        self._busy[worker], self._since[worker] = job, time.monotonic()

    def _give(self, worker: Worker) -> None:
        if not self._waiting:
            self._idle.append(worker)
            return
        job = self._waiting.popleft()
        self._at(worker, job)
        self._crew.send(worker, job)

    def _take_over(self) -> None:
        """After one worker less: who has nothing to do takes its job. A new one might never find room beside them."""
        if not self._waiting:
            return
        if self._idle:
            self._give(self._idle.pop())
        else:
            self._replace()

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

    def _lost(self, job: Job, gone: Gone) -> None:
        """After a worker has died: another takes over what it had, unless that has killed too many."""
        if job == _STARTING:
            self._tried[_STARTING] += 1
            if gone.hopeless:
                raise UndeError(f"a worker {gone.how}")
            if self._tried[_STARTING] == STARTS:
                raise UndeError(f"{STARTS} workers in a row did not get to work: the last {gone.how}")
        else:
            self._again(job, f"{RETRIES + 1} workers died of it: the last {gone.how}")
        self._take_over()

    def _patience(self) -> float | None:
        return None if self._crew.timeout is None else min(1.0, self._crew.timeout)

    def _end_hung(self) -> None:
        limit = self._crew.timeout
        if limit is None:
            return
        for worker, job in list(self._busy.items()):
            if job != _STARTING and time.monotonic() - self._since[worker] > limit:
                del self._busy[worker]
                self._crew._all.remove(worker)
                self._crew.end(worker)
                self._again(job, f"it took longer than {limit:g} s, {RETRIES + 1} times")
                self._take_over()


def how_it_ended(code: int) -> str:
    """
    >>> how_it_ended(-9)
    'was killed (signal 9), often a sign of too little memory: try fewer workers'
    """
    if code == -signal.SIGKILL:
        return "was killed (signal 9), often a sign of too little memory: try fewer workers"
    return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
