"""What a trial may end in, and the count of it."""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from unde import UndeError

CLEAR, RIGHT = "clear error", "right result"
RAW, WRONG, LOST = "raw traceback", "silently wrong", "lost"
OUTCOMES = (CLEAR, RIGHT, RAW, WRONG, LOST)
BAD = (RAW, WRONG, LOST)
SECONDS = 60  # a trial that takes longer hangs


class Hang(BaseException):
    """Not an Exception: nobody is to take it for one of the program's own."""


@contextmanager
def in_time(seconds: int = SECONDS) -> Generator[None]:
    def give_up(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Tally:
    """Outcomes by category, and what the bad ones were."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def note(self, category: str, outcome: str, what: str = "") -> None:
        self.counts.setdefault(category, Counter())[outcome] += 1
        if outcome in BAD:
            self.examples.append(f"{category}: {outcome}: {what}")

    @property
    def bad(self) -> int:
        return sum(count[outcome] for count in self.counts.values() for outcome in BAD)


def tried(run: Callable[[], bool]) -> tuple[str, str]:
    """The outcome of a trial: `run` says whether its result is right, or raises."""
    try:
        with in_time():
            right = run()
    except UndeError as e:
        one = str(e).strip()
        return (CLEAR, one) if one else (RAW, "an empty message")
    except SystemExit as e:
        return (CLEAR, "") if e.code in (1, 2) else (RAW, f"exit code {e.code}")
    except Hang:
        return RAW, "it hangs"
    except (Exception, KeyboardInterrupt) as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        return RAW, f"{type(e).__name__}: {e} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    return (RIGHT, "") if right else (WRONG, "another result")
