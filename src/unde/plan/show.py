"""Numbers and tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def flops(count: float) -> str:
    """Operations for people.

    >>> flops(3.2e15)
    '3.2 PFLOP'
    """
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:.3g} ZFLOP"


def columns(rows: Sequence[tuple[str, ...]], left: int | None = None) -> list[str]:
    """Aligned, under a line; all but the first column, and that with number `left`, to the right.

    >>> columns([("file", "bytes"), ("probe", "7")])
    ['file   bytes', '------------', 'probe      7']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = (
            cell.ljust(w) if i in (0, left) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
        )
        return "  ".join(cells).rstrip()

    return [line(rows[0]), "-" * len(line(rows[0])), *(line(row) for row in rows[1:])]
