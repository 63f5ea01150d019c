"""A progress bar that only runs of more than a few seconds get to see."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from whence import console

_PATIENCE = 3.0  # seconds


@contextmanager
def progress(title: str, total: int) -> Generator[console.Advance]:
    """Gives `advance(steps)`; the bar appears once the wait gets long.

    >>> with progress("waiting", total=2) as advance:
    ...     advance(2)
    """
    start, waiting = time.monotonic(), 0
    draw: console.Advance | None = None
    with ExitStack() as stack:

        def advance(steps: int) -> None:
            nonlocal draw, waiting
            waiting += steps
            if draw is None and time.monotonic() - start > _PATIENCE:
                draw = stack.enter_context(console.progress(title, total))
            if draw is not None:
                draw(waiting)
                waiting = 0

        yield advance
