"""What an executor is. A job is a pure function of a context and its number that writes files."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from unde.errors import BadExample, UndeError

Job: TypeAlias = tuple[int, ...]
RETRIES = 2  # of a job that failed, before it is given up


class JobsFailed(Exception):
    """Some jobs failed for good; the others are done. `reasons` says why, by job."""

    def __init__(self, reasons: dict[Job, str]) -> None:
        super().__init__(f"{len(reasons)} jobs failed")
        self.reasons = reasons


class Executor(Protocol):
    @property
    def here(self) -> bool:
        """Whether jobs run in this process, on the very context that is given."""
        ...

    @property
    def alone(self) -> bool:
        """Whether nobody else works on the same jobs: then all of them are done in the end."""
        ...

    @property
    def threads(self) -> int | None:
        """Of torch, for each job; None: as many as this process has."""
        ...

    def mine(self, job: Job) -> bool:
        """Whether it is for this executor to do."""
        ...

    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> Iterator[Job]:
        """`function(context, *job)` for each of the jobs, which do not depend on one another; yields those done.

        Bad input (an `UndeError`) ends the run at once. What else fails is tried again, then left, and reported by
        `JobsFailed` when all others are done.
        """
        ...

    def close(self) -> None:
        """Ends workers that wait for the next run. Another run starts new ones."""
        ...


Answer: TypeAlias = (
    tuple[bool, str] | None
)  # None if it went well, else whether it is bad input, and what happened


def packed(function: Callable[..., None], context: Any) -> bytes:
    """A function of jobs with its context, for a worker elsewhere."""
    try:
        return pickle.dumps((function, context))
    except UndeError:
        raise
    except Exception as e:
        raise UndeError(
            f"what other processes are to run cannot be sent to them ({e}): functions must be at the top level of a "
            "module (or functools.partial of one). Move them there, or run in one process"
        ) from e


class Hand:
    """What a worker does with what it is sent: `take` makes the context, `do` runs a job on it.

    A context that has a `close` is closed before the next is made.
    """

    def __init__(self) -> None:
        self._held: tuple[Callable[..., None], Any] | None = None

    def take(self, sent: bytes) -> Answer:
        def make() -> None:
            if self._held is not None and hasattr(self._held[1], "close"):
                self._held[1].close()
            self._held = None  # its memory is free for the next
            self._held = pickle.loads(sent)

        return _answered(make)

    def do(self, job: Job) -> Answer:
        assert self._held is not None
        function, context = self._held
        return _answered(partial(function, context, *job))


def _answered(run: Callable[[], None]) -> Answer:
    try:
        run()
    except UndeError as e:
        # A store that does not answer may do so the next time, and other jobs have other examples.
        return not isinstance(e, (OSError, BadExample)), str(e)
    except Exception:
        return False, traceback.format_exc().strip()
    return None
