"""Every number of the paper's tables, and the few that its text gives for figures; all in %, if not said otherwise.

They are in paper_numbers.json: {name: {"about": which table, "numbers"}}, and attributes of this module. A pair is a
mean and the half width of its 95 % interval. Names are those of the paper but for methods: one spelling each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
WithAndWithout = dict[str, tuple[Interval, Interval]]  # method → without weights, with weights
TailPatch = dict[str, tuple[float, "float | None", "Interval | None"]]  # without, with weights, difference


def _fixed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fixed(v) for key, v in value.items()}
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
_NUMBERS = {name: _fixed(table["numbers"]) for name, table in _TABLES.items()}


def __getattr__(name: str) -> Any:
    if name not in _NUMBERS:
        raise AttributeError(name)
    return _NUMBERS[name]
