"""One job after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unde.execution.base import Job


class Serial:
    """
    >>> Serial().run(lambda context, a, b: context.append(a + b), made := [], [(1, 2), (3, 4)])
    >>> made
    [3, 7]
    """

    def run(self, function: Callable[..., None], context: Any, jobs: Sequence[Job]) -> None:
        for job in jobs:
            function(context, *job)
