"""What is printed while work goes on: the plan of a build, notes, and progress bars with rate and time left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from whence.features import Coverage
    from whence.index.manifest import Manifest

Advance = Callable[[int], None]
_err = Console(stderr=True)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.1f}/s" if task.speed else "–/s", style="dim")


@contextmanager
def progress(title: str, total: int, show: bool = True) -> Iterator[Advance]:
    """A bar with count, rate and time left; on a pipe or with show=False nothing is drawn.

    >>> with progress("reading", 2, show=False) as advance:
    ...     advance(2)
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=_err, disable=not show or not _err.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


def note(text: str) -> None:
    _err.print(text, style="yellow", highlight=False)


def size(count: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def index_bytes(manifest: Manifest) -> int:
    """Bytes on disk of a finished index, headers aside."""
    item = 4 if manifest.store_dtype == "float32" else 2
    per_example = manifest.width * item + len(manifest.units) * 4 + 13  # features, squares, loss, digest, skipped
    return manifest.examples * per_example * len(manifest.models)


def show_plan(folder: Path, manifest: Manifest, coverage: Coverage) -> None:
    """What is going to be built, and which way each parameter goes."""
    _err.print(
        f"[bold]{folder}[/]  {manifest.examples:,} examples × {manifest.width:,} features "
        f"({len(manifest.units)} parameters in {len(manifest.groups)} groups"
        + (f", {len(manifest.models)} checkpoints" if len(manifest.models) > 1 else "")
        + f"), {size(index_bytes(manifest))} in {manifest.store_dtype}, {len(manifest.shards)} shards",
        highlight=False,
    )
    rules = Counter(type(use.rule).__name__ for use in coverage.uses if use.layout)
    ways = [f"{n} × {name}" for name, n in rules.most_common()]
    _err.print(f"  by layer rules: {', '.join(ways) or 'none'}", highlight=False)
    for way, names in (
        ("by one copy for each example", list(coverage.expanded)),
        ("by torch.func.vmap", coverage.vmapped),
        ("by one backward pass for each example (slow)", coverage.looped),
        ("no gradient on the examples tried", coverage.unused),
    ):
        if names:
            _err.print(f"  {way}: {', '.join(names)}", highlight=False)
