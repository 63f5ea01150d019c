"""Rules of learning weights by self-retrieval, chosen on some data sets and reported on the one left out.

Of all rules of the study rule_grid the one with the largest mean gain in LDS over the cells of the other data sets is
taken, of those that make none of these cells significantly worse; what it does on the left-out data set is reported,
beside what the rule that the package ships does there.
"""

from __future__ import annotations

import json
import math
from statistics import fmean
from typing import Any

from experiments.pages.verdicts import verdicts
from experiments.shared.paths import RESULTS
from experiments.shared.sweep import EVERY_BANK

PAPER = ""
SHIPPED = "target 0.25, decay 0.1, 140 copies, guard on"  # the package also tries decay 1 and a second kind


def data_set(bank: str) -> str:
    """
    >>> data_set("cifar10-vit"), data_set("robots")
    ('cifar10', 'robots')
    """
    return bank.split("-", maxsplit=1)[0]


def run(variant: str | None) -> list[dict[str, Any]]:
    grids = {
        bank: json.loads(path.read_text())["results"]
        for bank in EVERY_BANK
        if (path := RESULTS / f"rule_grid_{bank}.json").exists()
    }
    rules = sorted({_unnamed(rule) for grid in grids.values() for m in grid.values() for rule in m["rules"]})
    rows = []
    for left_out in dict.fromkeys(map(data_set, grids)):
        others = [b for b in grids if data_set(b) != left_out]
        best = max(rules, key=lambda rule: _worth(_cells(grids, others, rule)))
        here = [b for b in grids if data_set(b) == left_out]
        for rule in dict.fromkeys((best, SHIPPED)):
            found = _cells(grids, here, rule)
            told = verdicts(found)
            pooled = fmean(d["mean"] for d in found)
            rows.append(
                {
                    "data set left out": left_out,
                    "rule": rule + (" (shipped)" if rule == SHIPPED else " (best on the others)"),
                    "pooled": {"mean": pooled, "ci95": _pooled_interval(found), "ci95_total": None},
                    **{v: told.count(v) for v in ("better", "worse", "same")},
                }
            )
    return rows


def _unnamed(rule: str) -> str:
    """A rule without the kind of perturbation, which differs between data sets."""
    return rule.split(", ", 1)[1]


def _cells(grids: dict[str, Any], banks: list[str], rule: str) -> list[dict[str, Any]]:
    """Differences of all methods of these banks under a rule with the first kind of perturbation."""
    found = []
    for bank in banks:
        for method in grids[bank].values():
            first = next(name for name in method["rules"] if _unnamed(name) == rule)
            found.append({**method["rules"][first], "ci95_total": None})
    return found


def _worth(found: list[dict[str, Any]]) -> float:
    return -math.inf if "worse" in verdicts(found) else fmean(d["mean"] for d in found)


def _pooled_interval(found: list[dict[str, Any]]) -> float:
    """Of the mean over cells, taken for independent."""
    return math.sqrt(sum(d["ci95"] ** 2 for d in found)) / len(found)
