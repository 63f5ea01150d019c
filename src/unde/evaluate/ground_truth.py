"""What is known about queries: what retrained models did, contributors, wrong labels; checked against their scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from unde.errors import UndeError
from unde.evaluate.arrays import booleans
from unde.evaluate.bank import Bank
from unde.evaluate.calibration import spearman, standardize
from unde.evaluate.estimate import Estimate
from unde.evaluate.metrics import FEWEST_SUBSETS_TO_RESAMPLE, predict, rank_correlation, share_below

FEWEST_HALVES = 4
FEWEST_TO_SPLIT = 4  # queries of a fold, and wrong labels
RECALL_AT, OPPONENTS = 10, 10
BOOTSTRAP = 1000
ALL = slice(None)


@dataclass(frozen=True)
class GroundTruth:
    """Outcomes of retrained models."""

    masks: np.ndarray  # (S, N) bool, the subsets
    utility: np.ndarray  # (S, Q), higher is better
    second_utility: np.ndarray | None = None  # (R, Q) of the subsets `repeated`, trained with another seed
    repeated: Sequence[int] = ()  # which subsets
    seconds: float = 0.0  # of all trainings


def parse_bank(bank: Bank | tuple[Any, Any], queries: int, examples: int) -> GroundTruth:
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


class Truth(ABC):
    """What is known about the queries. Of scores (q, N) it keeps (..., q) numbers, which are rated query by query."""

    measure: ClassVar[str]

    @property
    def models(self) -> int:
        """Retrained models; 0 where there are none."""
        return 0

    @abstractmethod
    def keep(self, scores: np.ndarray, queries: np.ndarray) -> np.ndarray:
        """What is kept of the scores of some queries."""

    def rate(self, kept: np.ndarray, queries: Any = ALL, models: Any = ALL) -> np.ndarray:
        """The measure of each of the queries, by some of the models."""
        return kept[queries]

    def fill(self, out: np.ndarray, kept: np.ndarray, queries: np.ndarray, models: np.ndarray) -> None:
        """Put into `out` what is kept of a fold of queries and models."""
        out[queries] = self.rate(kept, queries)

    def estimate(self, kept: np.ndarray, seed: int) -> Estimate:
        """The measure of what all folds put together."""
        return Estimate(kept)


@dataclass(frozen=True, eq=False)
class Retrained(Truth):
    """Retrained models: the LDS of predictions (S, q)."""

    masks: np.ndarray
    utility: np.ndarray
    measure: ClassVar[str] = "LDS"

    @property
    def models(self) -> int:
        return len(self.masks)

    def keep(self, scores: np.ndarray, queries: np.ndarray) -> np.ndarray:
        return predict(scores, self.masks)

    def rate(self, kept: np.ndarray, queries: Any = ALL, models: Any = ALL) -> np.ndarray:
        return spearman(kept[models][:, queries], self.utility[models][:, queries])

    def fill(self, out: np.ndarray, kept: np.ndarray, queries: np.ndarray, models: np.ndarray) -> None:
        out[np.ix_(models, queries)] = standardize(kept)[np.ix_(models, queries)]

    def estimate(self, kept: np.ndarray, seed: int) -> Estimate:
        draws = BOOTSTRAP if self.models >= FEWEST_SUBSETS_TO_RESAMPLE else 0
        return rank_correlation(kept, self.utility, self.masks, bootstrap=draws, seed=seed)


@dataclass(frozen=True, eq=False)
class Contributors(Truth):
    """Known contributors (Q, N): Recall@10."""

    marks: np.ndarray
    measure: ClassVar[str] = f"Recall@{RECALL_AT}"

    def keep(self, scores: np.ndarray, queries: np.ndarray) -> np.ndarray:
        count = min(RECALL_AT, scores.shape[1])
        top = torch.from_numpy(scores).topk(count, dim=1).indices.numpy()
        return np.take_along_axis(self.marks[queries], top, axis=1).mean(1)


@dataclass(frozen=True, eq=False)
class WrongLabels(Truth):
    """Queries with a wrong label (Q,): the AUC of opposition, as the mean placement of wrong and right ones."""

    marks: np.ndarray
    measure: ClassVar[str] = "AUC of wrong labels"

    def keep(self, scores: np.ndarray, queries: np.ndarray) -> np.ndarray:
        count = min(OPPONENTS, scores.shape[1])
        return -torch.from_numpy(scores).topk(count, dim=1, largest=False).values.sum(1).double().numpy()

    def rate(self, kept: np.ndarray, queries: Any = ALL, models: Any = ALL) -> np.ndarray:
        values, wrong = kept[queries], self.marks[queries]
        out = np.full(len(values), np.nan)
        if wrong.any() and not wrong.all():
            out[wrong] = share_below(values[wrong], values[~wrong])
            out[~wrong] = 1 - share_below(values[~wrong], values[wrong])
        return out


def read_truth(truth: Any, scores: Any) -> Truth:
    """The truth about the queries of scores, checked against them."""
    queries, examples = scores.shape
    if getattr(truth, "query_digests", None) is not None and hasattr(truth, "masks"):
        return _of_calibration(truth, scores)
    if isinstance(truth, tuple) or hasattr(truth, "masks"):
        bank = parse_bank(truth, queries, examples)
        return Retrained(bank.masks, bank.utility)
    shape = getattr(truth, "shape", None) or np.shape(truth)
    if tuple(shape) == (queries, examples):
        marks = booleans(truth, "truth", "(Q, N)")
        if not marks.any():
            raise UndeError("truth marks no contributor of any query: expected some")
        return Contributors(marks)
    if tuple(shape) == (queries,):
        wrong = booleans(truth, "truth", "(Q,)")
        if min(wrong.sum(), (~wrong).sum()) < FEWEST_TO_SPLIT:
            raise UndeError(
                f"{int(wrong.sum())} of {queries} labels are marked as wrong: expected {FEWEST_TO_SPLIT} or more of "
                "both kinds"
            )
        return WrongLabels(wrong)
    raise UndeError(
        f"truth is a {type(truth).__name__} of shape {tuple(shape)}: expected an unde.evaluate.Bank, (masks, utility) "
        f"or a calibration of these queries, contributors {(queries, examples)} or wrong labels ({queries},)"
    )


def _of_calibration(calibration: Any, scores: Any) -> Retrained:
    place = {digest: i for i, digest in enumerate(calibration.query_digests)}
    missing = [q for q, digest in enumerate(scores.query_digests) if digest not in place]
    if calibration.masks is None or missing or calibration.masks.shape[1] != scores.shape[1]:
        raise UndeError(
            "the calibration does not know these scores: expected one that was made by this release, with the same "
            f"training examples and with all of the queries; {len(missing)} of {scores.shape[0]} are not among its "
            f"{len(place)}"
        )
    rows = [place[digest] for digest in scores.query_digests]
    return Retrained(calibration.masks, calibration.utility[:, rows])
