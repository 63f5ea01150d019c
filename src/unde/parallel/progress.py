"""Jobs with a bar, and one clear error for those that fail for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unde import console
from unde.errors import UndeError
from unde.parallel.base import Executor, Job, JobsFailed


def shown(
    executor: Executor,
    function: Callable[..., None],
    context: Any,
    jobs: Sequence[Job],
    title: str,
    *,
    called: Callable[[Job], str] = "part {}".format,
    size: Callable[[Job], int] = lambda job: 1,
    unit: str = "parts",
) -> Iterator[Job]:
    """As `executor.run`. A bar counts the `size` of each job in `unit`; `called` names a job in an error.

    >>> from unde.parallel import SERIAL
    >>> list(shown(SERIAL, lambda context, i: None, None, [(1,), (2,)], "counting"))
    [(1,), (2,)]
    """
    try:
        with console.progress(title, sum(map(size, jobs)), unit=unit) as advance:
            for job in executor.run(function, context, jobs):
                yield job
                advance(size(job))
    except JobsFailed as e:
        job, reason = next(iter(e.reasons.items()))
        raise UndeError(f"{title}: {called(job)} failed again and again: {reason}") from None
