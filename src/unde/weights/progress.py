"""A progress bar that only runs of more than a few seconds get to see."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from unde import console

_PATIENCE = 3.0  # seconds
_open = 0  # how many of these are open: terminals show one bar at a time


@contextmanager
def progress(title: str, total: int) -> Generator[console.Advance]:
    """Gives `advance(steps)`; the bar appears once the wait gets long, and never inside another one.

    >>> with progress("waiting", total=2) as advance:
    ...     advance(2)
    """
    global _open
    start, waiting, outermost = time.monotonic(), 0, _open == 0
    draw: console.Advance | None = None
    with ExitStack() as stack:

        def advance(steps: int) -> None:
            nonlocal draw, waiting
            waiting += steps
            if draw is None and outermost and time.monotonic() - start > _PATIENCE:
                draw = stack.enter_context(console.progress(title, total))
            if draw is not None:
                draw(waiting)
                waiting = 0

        _open += 1
        try:
            yield advance
        finally:
            _open -= 1
