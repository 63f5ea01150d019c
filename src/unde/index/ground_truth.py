"""Outcomes of retrained models, which calibration compares settings with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unde.errors import UndeError
from unde.evaluate.bank import Bank

FEWEST_HALVES = 4


@dataclass(frozen=True)
class GroundTruth:
    """Outcomes of retrained models."""

    masks: np.ndarray  # (S, N) bool, the subsets
    utility: np.ndarray  # (S, Q), higher is better
    second_utility: np.ndarray | None = None  # (R, Q) of the subsets `repeated`, trained with another seed
    repeated: Sequence[int] = ()  # which subsets
    seconds: float = 0.0  # of all trainings


def read_bank(bank: Bank | tuple[Any, Any], queries: int, examples: int) -> GroundTruth:
    """Outcomes of models that are retrained already."""
    if isinstance(bank, Bank):
        fitting = {name: u for name, u in bank.utility.items() if u.shape[1] == queries}
        if len(fitting) != 1:
            sets = ", ".join(f"{name!r} {u.shape}" for name, u in bank.utility.items())
            raise UndeError(
                f"{len(fitting)} sets of utilities of the bank have as many queries as are given ({queries}); it has "
                f"{sets}: say which, bank=(bank.masks, bank.utility[name])"
            )
        bank = (bank.masks, next(iter(fitting.values())))
    try:
        masks, utility = (np.asarray(part) for part in bank)
    except (TypeError, ValueError):
        raise UndeError(
            f"bank is a {type(bank).__name__}: expected an unde.evaluate.Bank, or (masks, utility)"
        ) from None
    wanted = f"expected masks (S, {examples}) and utility (S, {queries}), S ≥ {FEWEST_HALVES}"
    if masks.ndim != 2 or utility.ndim != 2 or len(masks) != len(utility) or len(masks) < FEWEST_HALVES:
        raise UndeError(f"the bank has masks {masks.shape} and utility {utility.shape}: {wanted}")
    if masks.shape[1] != examples or utility.shape[1] != queries:
        raise UndeError(
            f"the bank is of other data: masks {masks.shape}, utility {utility.shape}; {wanted}, the training "
            "examples of the index and the queries that are given, in their order"
        )
    if not np.isfinite(utility).all():
        raise UndeError("the utilities of the bank hold NaN or infinite values: did a training diverge?")
    return GroundTruth(masks.astype(bool), utility.astype(np.float64))


def parse_duration(text: str | float) -> float:
    """Seconds of "30min", "2h", "90s", or a number of seconds.

    >>> parse_duration("30min"), parse_duration("1.5h"), parse_duration(90)
    (1800.0, 5400.0, 90.0)
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool) and text > 0:
        return float(text)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|sec|min|m|h|d)?\s*", str(text))
    if match is None or float(match[1]) <= 0:
        raise UndeError(f"budget is {text!r}: expected a time, such as '30min', '2h' or a number of seconds")
    return float(match[1]) * {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[match[2] or "s"]
