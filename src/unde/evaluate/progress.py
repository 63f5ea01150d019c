"""A progress bar for jobs of minutes to hours: on a terminal a bar, in a log file a line now and then."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_SECONDS_BETWEEN_LINES = 30.0


class ModelProgress:
    """Counts models as they finish, and tells the rate and the time left.

    The rate counts only what finished since the start, so that a resumed job does not boast.
    """

    def __init__(self, title: str, total: int, done: int) -> None:
        self._title, self._total, self._done, self._first = title, total, done, done
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[pace]}"),
        )
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)

    def __enter__(self) -> ModelProgress:
        self._start = self._last_line = time.monotonic()
        self._bar.start()
        self._task = self._bar.add_task(self._title, total=self._total, completed=self._done, pace="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self) -> None:
        """One more model is finished."""
        self._done += 1
        now = time.monotonic()
        text = pace(self._done - self._first, self._total - self._done, now - self._start)
        self._bar.update(self._task, completed=self._done, pace=text)
        if self._bar.disable and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._console.print(f"{self._title}: {self._done}/{self._total}, {text}", soft_wrap=True)


def pace(finished: int, left: int, seconds: float) -> str:
    """The rate so far and the time left at that rate.

    >>> pace(finished=4, left=20, seconds=60.0)
    '4.0 models/min, 5 min left'
    """
    per_second = finished / max(seconds, 1e-9)
    remaining = left / per_second
    if remaining < 90:
        time_left = f"{remaining:.0f} s"
    elif remaining < 5400:
        time_left = f"{remaining / 60:.0f} min"
    else:
        time_left = f"{remaining / 3600:.1f} h"
    rate = f"{per_second:.1f} models/s" if per_second >= 1 else f"{per_second * 60:.1f} models/min"
    return f"{rate}, {time_left} left"
