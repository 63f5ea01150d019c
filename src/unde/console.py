"""What is printed while work goes on: the plan of a build, notes, progress bars with rate and time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

Advance = Callable[[int], None]
_err = Console(stderr=True)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.1f}/s" if task.speed else "–/s", style="dim")


class _Estimate:
    """Says once, after the first few steps, how long all of it will take. The first step warms up."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit = total, unit
        self.steps, self.count, self.started = 0, 0, 0.0

    def __call__(self, count: int) -> None:
        self.steps += 1
        if self.steps == 1:
            self.started = time.monotonic()
            return
        if self.count < 0:
            return
        self.count += count
        seconds = time.monotonic() - self.started
        enough = seconds > 1 or 10 * self.count > self.total
        if (self.steps > 3 and enough) or seconds > 10:
            line(f"  about {duration(self.total * seconds / self.count)} for {self.total:,} {self.unit}")
            self.count = -1


@contextmanager
def progress(title: str, total: int, show: bool = True, estimate: str = "") -> Generator[Advance]:
    """A bar with count, rate and time left; on a pipe or with show=False no bar is drawn.

    With `estimate`, the name of what is counted, the expected time is also said in a line that stays.

    >>> with progress("reading", 2, show=False) as advance:
    ...     advance(2)
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    told = _Estimate(total, estimate) if estimate and show else None
    with Progress(*columns, console=_err, disable=not show or not _err.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=total)

        def advance(count: int) -> None:
            bar.update(task, advance=count)
            if told:
                told(count)

        yield advance


def note(text: str) -> None:
    line(text, style="yellow")


def line(text: str, style: str = "") -> None:
    _err.print(escape(text), style=style, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Time for people.

    >>> duration(0.2), duration(41), duration(200), duration(9000)
    ('1 s', '41 s', '3 min', '2 h 30 min')
    """
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def size(count: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def say(text: str) -> None:
    """A line to stderr, with rich markup."""
    _err.print(text, highlight=False)


def fail(text: str) -> None:
    _err.print(Text.assemble(("error: ", "bold red"), text), highlight=False, soft_wrap=True)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout."""
    table = Table(title=title, title_justify="left")
    for c in columns:
        table.add_column(c)
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
