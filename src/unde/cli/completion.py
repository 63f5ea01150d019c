"""Shell completion: names of methods, and folders that hold an index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from unde.store.layout import MANIFEST

_DEEP = 3  # folders below what was typed
_MOST = 500  # folders that are looked at


def one_of(*names: str) -> Callable[[str], list[str]]:
    """
    >>> one_of("serial", "processes:4", "array")("s")
    ['serial']
    """

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def indexes(incomplete: str) -> list[str]:
    """Folders below the typed one that hold an index. Without any, shells complete files."""
    folder, begun = os.path.split(incomplete)
    budget = iter(range(_MOST))
    return sorted(_below(Path(folder).expanduser(), folder, begun, _DEEP, budget))


def _below(real: Path, typed: str, begun: str, depth: int, budget: Iterator[int]) -> Iterator[str]:
    try:
        folders = sorted(
            p for p in real.iterdir() if p.name.startswith(begun) and p.is_dir() and not p.is_symlink()
        )
    except OSError:
        return
    for path in folders:
        if (path.name.startswith(".") and not begun) or next(budget, None) is None:
            continue
        name = os.path.join(typed, path.name)
        if (path / MANIFEST).is_file():
            yield name
        elif depth > 1:
            yield from _below(path, name, "", depth - 1, budget)
