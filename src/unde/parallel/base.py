"""Executors of numbered jobs. A job is a pure function of a context and its number that writes files."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from unde.errors import BadExample, UndeError

Job: TypeAlias = tuple[int, ...]
RETRIES = 2  # of a job that failed, before it is given up


class JobsFailed(Exception):
    """Some jobs failed for good, for `reasons`; the others are done."""

    def __init__(self, reasons: dict[Job, str]) -> None:
        super().__init__(f"{len(reasons)} jobs failed")
        self.reasons = reasons


class Executor(Protocol):
    @property
    def in_process(self) -> bool:
        """Whether jobs run in this process, on the context itself."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether no other process works on the same jobs, so that all are done when `run` ends."""
        ...

    @property
    def threads(self) -> int | None:
        """Threads of torch for each job; None: those of this process."""
        ...

    def owns(self, job: Job) -> bool:
        """Whether this executor is the one to do a job."""
        ...

    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> Iterator[Job]:
        """Call `function(context, *job)` for independent jobs; yields each job that is done.

        Raises:
            UndeError: Bad input; ends the run at once.
            JobsFailed: Jobs that failed again after retries; raised when all others are done.
        """
        ...

    def close(self) -> None:
        """End idle workers; the next run starts new ones."""
        ...


@dataclass(frozen=True)
class Serial:
    """One job after the other, in this process; the first error ends the run.

    >>> list(Serial().run(lambda context, a, b: context.append(a + b), made := [], [(1, 2), (3, 4)]))
    [(1, 2), (3, 4)]
    >>> made
    [3, 7]
    """

    threads: int | None = None
    in_process: bool = True
    exclusive: bool = True

    def owns(self, job: Job) -> bool:
        return True

    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> Iterator[Job]:
        for job in jobs:
            function(context, *job)
            yield job

    def close(self) -> None:
        pass


SERIAL = Serial()


Answer: TypeAlias = (
    tuple[bool, str] | None
)  # None if it went well, else whether it is bad input, and what happened


def pack_job(function: Callable[..., None], context: Any) -> bytes:
    """Pickle a function of jobs and its context for other processes."""
    try:
        return pickle.dumps((function, context))
    except UndeError:
        raise
    except Exception as e:
        raise UndeError(
            f"what other processes are to run cannot be sent to them ({e}): functions must be at the top level of a "
            "module (or functools.partial of one). Move them there, or run in one process"
        ) from e


class JobRunner:
    """Worker side of a pool: `load` a pickled function and context, then `run` jobs on it.

    A context with a `close` method is closed before the next is loaded.
    """

    def __init__(self) -> None:
        self._loaded: tuple[Callable[..., None], Any] | None = None

    def load(self, payload: bytes) -> Answer:
        def make() -> None:
            if self._loaded is not None and hasattr(self._loaded[1], "close"):
                self._loaded[1].close()
            self._loaded = None  # its memory is free for the next
            self._loaded = pickle.loads(payload)

        return _catch(make)

    def run(self, job: Job) -> Answer:
        assert self._loaded is not None
        function, context = self._loaded
        return _catch(partial(function, context, *job))


def _catch(run: Callable[[], None]) -> Answer:
    try:
        run()
    except UndeError as e:
        # A store that does not answer may do so the next time, and other jobs have other examples.
        return not isinstance(e, (OSError, BadExample)), str(e)
    except Exception:
        return False, traceback.format_exc().strip()
    return None
