"""Output on the terminal: notes, tables, progress bars with rate and time left."""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from unde.errors import UndeError


class Advance(Protocol):
    """Count what is done; `state` is a text shown beside the count."""

    def __call__(self, count: int, /, state: str | None = None) -> None: ...


PATIENCE = 3.0  # seconds before a bar appears
BETWEEN_LINES = 30.0  # seconds between lines, where there is no terminal
_err = Console(stderr=True)
_busy = False  # whether a job is shown: one at a time


class _ProgressJob:
    """Progress of one job: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, label: str, total: int, unit: str, done: int, estimate: bool) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.first = self.done = done
        self.started = self.last_line = time.monotonic()
        self.bar: Progress | None = None
        self.state = ""
        self.estimate, self.steps, self.warm_up = estimate, 0, (0.0, 0)

    def advance(self, count: int, state: str | None = None) -> None:
        self.done += count
        if state is not None:
            self.state = state
        now = time.monotonic()
        if count:
            self.steps += 1
            if self.steps == 1:
                self.warm_up = now, self.done
        if _err.is_terminal:
            if now - self.started >= PATIENCE:
                self._draw(now)
        elif now - self.last_line >= BETWEEN_LINES:
            self.last_line = now
            line(f"{self.label}: {self._state(now)}")
        if self.estimate and self.steps > 1:
            self._print_estimate(now)

    def _print_estimate(self, now: float) -> None:
        """Print the time for all of it once, after the first few steps."""
        seconds, count = self._measure(now)
        if not count:
            return
        enough = seconds > 1 or 10 * count > self.total
        if (self.steps > 3 and enough) or seconds > 10:
            line(f"  about {duration(self.total * seconds / count)} for {self.total:,} {self.unit}")
            self.estimate = False

    def _measure(self, now: float) -> tuple[float, int]:
        """Seconds and how much was done in them: since the first step, which warms up, if there were others."""
        start, first = (
            self.warm_up if self.done > self.warm_up[1] > self.first else (self.started, self.first)
        )
        return now - start, self.done - first

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def close(self) -> None:
        """Print a last line if the job took long."""
        now = time.monotonic()
        if now - self.started >= BETWEEN_LINES:
            took = f"{self.done - self.first:,} {self.unit} in {duration(now - self.started)}"
            line(f"{self.label}: {took}, {self._rate(now)}")

    def _draw(self, now: float) -> None:
        if self.bar is None:
            label, state = ("{task.description}", "{task.fields[state]}")
            columns = TextColumn(label, markup=False), BarColumn(24), TextColumn(state, markup=False)
            self.bar = Progress(*columns, console=_err, transient=True)
            self.bar.add_task(self.label, total=self.total, state="")
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=self.done, state=self._state(now))

    def _state(self, now: float) -> str:
        seconds, count = self._measure(now)
        left = f", {duration((self.total - self.done) * seconds / count)} left" if count else ""
        state = f"; {self.state}" if self.state else ""
        return f"{self.done:,}/{self.total:,}, {self._rate(now)}{left}{state}"

    def _rate(self, now: float) -> str:
        """Rate of this run, without what an earlier run did."""
        return rate(self.done - self.first, now - self.started, self.unit)


@contextmanager
def progress(
    label: str, total: int, show: bool = True, estimate: str = "", *, unit: str = "examples", done: int = 0
) -> Generator[Advance]:
    """Give `advance(count)`; show progress with rate and time left if the job takes more than a few seconds.

    A bar on a terminal, elsewhere a line every half a minute and one at the end. Nested jobs show nothing. `unit` is
    what is counted, `done` how much an earlier run did. If the unit is given as `estimate`, a line with the time for
    all of it is printed too. A KeyboardInterrupt gets how far the job was as its argument.

    >>> with progress("reading", 2, show=False) as advance:
    ...     advance(2)
    """
    global _busy
    if not show or _busy:
        yield lambda count, state=None: None
        return
    job = _ProgressJob(label, total, estimate or unit, done, bool(estimate))
    _busy = True
    try:
        yield job.advance
    except KeyboardInterrupt as e:
        e.args = (f"after {job.done:,} of {total:,} {job.unit}",)
        raise
    finally:
        _busy = False
        job.stop()
    job.close()


@contextmanager
def silent(when: bool = True) -> Generator[None]:
    """Show no progress of jobs inside the block."""
    global _busy
    before, _busy = _busy, _busy or when
    try:
        yield
    finally:
        _busy = before


def rate(count: int, seconds: float, unit: str) -> str:
    """How many in a second, a minute or an hour, whichever can be read.

    >>> rate(4, 60.0, "models"), rate(4, 2.0, "examples"), rate(1, 200.0, "models")
    ('4.0 models/min', '2.0 examples/s', '18.0 models/h')
    """
    per_second = count / max(seconds, 1e-9)
    for span, name in ((1, "s"), (60, "min")):
        if span * per_second >= 1:
            return f"{span * per_second:,.1f} {unit}/{name}"
    return f"{3600 * per_second:,.1f} {unit}/h"


def plain(text: str) -> str:
    """Text that is safe on a terminal: control characters are escaped.

    >>> print(plain("a\\x1b[2Jb\\nc"))
    a\\x1b[2Jb
    c
    """
    return text if text.isprintable() else "".join(map(_escape_control, text))


def _escape_control(c: str) -> str:
    harmless = c in "\n\t\u200c\u200d" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    return c if harmless else c.encode("unicode_escape", "surrogatepass").decode()


def cell(value: Any) -> Any:
    """A value for a CSV file: a text that a spreadsheet would run as a formula gets an apostrophe in front.

    >>> cell("=1+1"), cell("-12"), cell(-0.5), cell("row-3")
    ("'=1+1", '-12', -0.5, 'row-3')
    """
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def note(text: str) -> None:
    line(text, style="yellow")


def line(text: str, style: str = "") -> None:
    _err.print(escape(plain(text)), style=style, highlight=False, soft_wrap=True)


def echo(text: object) -> None:
    """Lines on stdout, for people or for other programs."""
    with printing() as out:
        out.write(plain(str(text)) + "\n")


@contextmanager
def printing() -> Generator[TextIO]:
    """stdout, flushed at the end: a full disk raises here and not when Python exits."""
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # whoever reads it has seen enough
    except OSError as e:
        with suppress(OSError, ValueError):  # what is left in its buffer would be tried again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UndeError(
            f"cannot write the output ({e.strerror}): make room there, and run it again"
        ) from None


def duration(seconds: float, exact: bool = False) -> str:
    """Time for people: round as estimates are, or `exact` as what was measured.

    >>> duration(0.2), duration(41), duration(200), duration(9000)
    ('1 s', '41 s', '3 min', '2 h 30 min')
    >>> duration(0.042, exact=True), duration(7.31, exact=True), duration(125, exact=True)
    ('0.04 s', '7.3 s', '2 min 05 s')
    """
    minutes = round(seconds / 60)
    if seconds < (59.95 if exact else 90):
        return f"{seconds:.{2 if seconds < 1 else 1}f} s" if exact else f"{max(1, round(seconds))} s"
    if exact and round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    if not exact and minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def counted(count: int, what: str) -> str:
    """A number with its noun.

    >>> counted(1, "shard"), counted(1200, "example"), counted(3, "query")
    ('1 shard', '1,200 examples', '3 queries')
    """
    several = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count:,} {what if count == 1 else several}"


def size(count: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def say(text: str) -> None:
    """A line to stderr, with rich markup."""
    _err.print(plain(text), highlight=False)


def fail(text: str) -> None:
    _err.print(Text.assemble(("error: ", "bold red"), plain(text)), highlight=False, soft_wrap=True)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout."""
    table = Table(title=plain(title), title_justify="left")
    for c in columns:
        table.add_column(c)
    for row in rows:
        table.add_row(*(escape(plain(cell)) for cell in row))
    with printing() as out:
        Console(file=out).print(table)
