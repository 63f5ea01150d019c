"""In how many cells do weights help, in how many do they harm? Counted the strict way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.pages.book import half_width, number

LEVEL = 0.05
_Z95 = 1.96


def p_value(mean: float, half_width: float) -> float:
    """Two-sided, of a mean of zero, from the half width of a 95 % interval taken for a normal one.

    >>> round(p_value(1.96, 1.96), 3), p_value(0.0, 0.0), p_value(1.0, 0.0)
    (0.05, 1.0, 0.0)
    """
    if half_width == 0:  # uniform weights: no query's score changed
        return 1.0 if mean == 0 else 0.0
    return math.erfc(abs(mean) / (half_width / _Z95) / math.sqrt(2))


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Which hypotheses are rejected when the chance of one false rejection among all is kept below the level.

    >>> holm([0.04, 0.01, 0.03])  # 0.01 ≤ 0.05 / 3, but 0.03 > 0.05 / 2
    [False, True, False]
    """
    rejected = [False] * len(p_values)
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[at] > level / (len(p_values) - rank):
            break
        rejected[at] = True
    return rejected


def evidence(difference: Mapping[str, Any]) -> float:
    """The p-value of a cell.

    A gain has to stand out of the noise of queries and subsets. For a loss the noise of queries is enough: the models
    that are there are the ones on which users are told that weights do no harm.
    """
    total = difference.get("ci95_total")
    gain = difference["mean"] > 0 and total is not None
    return p_value(difference["mean"], total if gain else difference["ci95"])


def verdicts(differences: Sequence[Mapping[str, Any]]) -> list[str]:
    """ "better", "worse" or "same" for each cell, Holm-corrected over all of them.

    >>> clear = {"mean": 0.1, "ci95": 0.01, "ci95_total": 0.02}
    >>> verdicts([clear, {**clear, "mean": -0.1}, {**clear, "mean": 0.001}])
    ['better', 'worse', 'same']
    """
    significant = holm([evidence(d) for d in differences])
    return [
        "same" if not clear else "better" if d["mean"] > 0 else "worse"
        for clear, d in zip(significant, differences)
    ]


@dataclass(frozen=True)
class Count:
    """What one rule of learning weights did over all cells it was measured on."""

    cells: int
    better: int
    worse: int
    pooled: float  # mean difference
    ci95: float

    @property
    def mean(self) -> str:
        """In points of LDS."""
        return f"{number(100 * self.pooled, sign=True)} ± {100 * self.ci95:.2f}"


def count(banks: Mapping[str, Sequence[Mapping[str, Any]]]) -> Count:
    """{bank: differences of its methods} → the count, and the mean over cells with its interval.

    The methods of a bank share its queries and retrained models: their errors are taken to be one and the same, which
    makes the interval rather too wide. Banks are independent.
    """
    cells = [d for differences in banks.values() for d in differences]
    found = verdicts(cells)
    variance = 0.0
    for differences in banks.values():
        variance += (sum(map(half_width, differences)) / len(cells)) ** 2
    return Count(
        len(cells),
        found.count("better"),
        found.count("worse"),
        fmean(d["mean"] for d in cells),
        math.sqrt(variance),
    )
