"""One thing at a time for a model: questions wait in a line, and everybody can see how long it is."""

from __future__ import annotations

import secrets
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from unde import console
from unde.errors import UndeError

MOST = 32  # jobs that wait
KEPT = 64  # finished ones whose results are held until they are fetched


class Unanswered(UndeError):
    """What the page asks for is not at hand: `status` of the answer, and what the page can do about it."""

    def __init__(self, why: str, status: int, **remedy: Any) -> None:
        super().__init__(why)
        self.status, self.remedy = status, remedy


class Cancelled(Exception):
    """Nobody waits for this job any more."""


class BackgroundJob:
    """Something to be done, how far it is, and what came of it."""

    def __init__(self, work: Callable[[BackgroundJob], Any], quiet: bool) -> None:
        self.id, self.work, self.quiet = secrets.token_urlsafe(9), work, quiet
        self.state = "waiting"  # running, done, failed, cancelled
        self.result: Any = None
        self.error = ""
        self.doing, self.done, self.total = "", 0, 0
        self.cancelled = False
        self._changed = threading.Condition()

    def tell(self, doing: str, done: int = 0, total: int = 0) -> None:
        """How far it is; ends the job if nobody waits for it."""
        if self.cancelled:
            raise Cancelled
        with self._changed:
            self.doing, self.done, self.total = doing, done, total
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until it has ended, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended, seconds)

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    def end(self, state: str, result: Any = None, error: str = "") -> None:
        with self._changed:
            self.state, self.result, self.error = state, result, error
            self._changed.notify_all()


class Jobs:
    """A thread that does one job after the other. Quiet ones, such as shading, let questions go first."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, BackgroundJob] = OrderedDict()
        self._waiting: list[BackgroundJob] = []
        self._running: BackgroundJob | None = None
        self._more = threading.Condition()
        threading.Thread(target=self._work, name="unde-questions", daemon=True).start()

    def submit(self, work: Callable[[BackgroundJob], Any], quiet: bool = False) -> BackgroundJob:
        job = BackgroundJob(work, quiet)
        with self._more:
            if len(self._waiting) >= MOST:
                raise UndeError(f"{MOST} questions are waiting already: ask again in a moment")
            self._waiting.append(job)
            self._known[job.id] = job
            for old in [k for k, j in self._known.items() if j.ended][: max(0, len(self._known) - KEPT)]:
                del self._known[old]
            self._more.notify()
        return job

    def find(self, name: str) -> BackgroundJob:
        job = self._known.get(name)
        if job is None:
            raise UndeError("this question is no longer known: ask it again")
        return job

    def cancel(self, job: BackgroundJob) -> None:
        with self._more:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
                job.end("cancelled")

    def position(self, job: BackgroundJob) -> int:
        """How many come before a job that waits."""
        with self._more:
            if job not in self._waiting:
                return 0
            line = sorted(self._waiting, key=lambda j: j.quiet)
            return line.index(job) + (self._running is not None)

    def __len__(self) -> int:
        """How many questions wait or are being answered."""
        with self._more:
            running = [] if self._running is None else [self._running]
            return sum(not job.quiet for job in [*running, *self._waiting])

    def _work(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._waiting)
                job = next((j for j in self._waiting if not j.quiet), self._waiting[0])
                self._waiting.remove(job)
                self._running = job
            job.state = "running"
            try:
                job.end("done", job.work(job))
            except Cancelled:
                job.end("cancelled")
            except UndeError as e:
                job.end("failed", error=str(e))
            # Whatever a model does: the next question is answered all the same.
            except (Exception, SystemExit) as e:
                console.line(traceback.format_exc())
                job.end("failed", error=f"{type(e).__name__}: {e} (the terminal has the whole of it)")
            finally:
                with self._more:
                    self._running = None
