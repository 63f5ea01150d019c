"""A mean over queries with its uncertainty, and the paired difference of two of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from unde.errors import UndeError
from unde.evaluate.arrays import numbers
from unde.markup import Child, facts, interval

DRAWS = 500  # bootstrap draws of the training seeds


@dataclass(frozen=True, eq=False)
class SubsetBootstrap:
    """The mean over queries in each bootstrap draw of the retraining subsets.

    Bootstraps with the same `key` used the same draws of the same models: their difference, draw by draw, is the
    bootstrap of the difference.
    """

    means: np.ndarray  # (B,), nan where a draw left the quantity undefined
    subsets: int
    key: str

    def standard_error(self) -> float:
        return float(np.nanstd(self.means, ddof=1))


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    """A quantity measured on each query, its mean, and a confidence interval of the mean.

    Args:
        per_query: (Q,) values; nan where the quantity is undefined. Such queries take no part in the mean and the
            interval.
        subset_bootstrap: Means over queries for resampled retraining subsets, if there are any.

    Raises:
        UndeError: A value is infinite, or all are undefined.

    Example:
        >>> e = Estimate(np.array([0.1, 0.2, 0.3, 0.4]))
        >>> e.mean, round(e.ci95, 4)
        (0.25, 0.2054)
        >>> print(e)
        0.25 ± 0.21
        >>> f"{e:.1%}"
        '25.0% ± 20.5%'
        >>> print(Estimate(np.array([0.1, np.nan, 0.3, 0.2])))
        0.20 ± 0.25 (undefined for 1 of 4 queries)
    """

    per_query: np.ndarray  # (Q,)
    subset_bootstrap: SubsetBootstrap | None = None

    def __post_init__(self) -> None:
        values = numbers(self.per_query, "per_query", "(Q,)").astype(np.float64)
        if np.isinf(values).any():
            raise UndeError(f"per_query is infinite at query {int(np.argmax(np.isinf(values)))}")
        if np.isnan(values).all():
            raise UndeError(f"undefined for all {len(values)} queries: there is nothing to average")
        values.setflags(write=False)
        object.__setattr__(self, "per_query", values)

    @property
    def undefined(self) -> int:
        """How many queries have no defined value."""
        return int(np.isnan(self.per_query).sum())

    @property
    def mean(self) -> float:
        """The mean over the queries that have a value."""
        return float(np.nanmean(self.per_query))

    @property
    def ci95(self) -> float:
        """Half width of the 95 % interval of the mean over queries, by Student's t; nan for a single query."""
        count = len(self.per_query) - self.undefined
        return quantile(0.975, count - 1) * self._standard_error()

    @property
    def ci95_total(self) -> float | None:
        """Half width of the 95 % interval over queries and retraining subsets; None without a bootstrap.

        The two variances are added. Noise of one query and one subset is in both, so the interval is slightly wide.
        """
        if self.subset_bootstrap is None:
            return None
        spread = math.hypot(self._standard_error(), self.subset_bootstrap.standard_error())
        count = min(len(self.per_query) - self.undefined, self.subset_bootstrap.subsets)
        return quantile(0.975, count - 1) * spread

    def as_dict(self) -> dict[str, float | int | None]:
        """The summary, ready for JSON (a missing interval is None).

        >>> Estimate(np.array([0.5])).as_dict()
        {'mean': 0.5, 'ci95': None, 'ci95_total': None, 'queries': 1, 'undefined': 0}
        """
        return {
            "mean": self.mean,
            "ci95": _or_none(self.ci95),
            "ci95_total": _or_none(self.ci95_total),
            "queries": len(self.per_query),
            "undefined": self.undefined,
        }

    def __str__(self) -> str:
        notes = []
        if self.ci95_total is not None:
            notes.append(f"± {_two_digits(self.ci95_total, self.ci95_total)} with subset noise")
        if self.undefined:
            notes.append(f"undefined for {self.undefined} of {len(self.per_query)} queries")
        if math.isnan(self.ci95):
            body = f"{self.mean:.4g}"
            notes.insert(0, "one query, no interval")
        else:
            body = f"{_two_digits(self.mean, self.ci95)} ± {_two_digits(self.ci95, self.ci95)}"
        return f"{body} ({'; '.join(notes)})" if notes else body

    def __repr__(self) -> str:
        return f"Estimate({self})"

    def _repr_html_(self) -> str:
        known = self.per_query[~np.isnan(self.per_query)]
        half = self.ci95_total or self.ci95
        low, high = min(known.min(), self.mean), max(known.max(), self.mean)
        rows: dict[str, Child] = {"mean": str(self)}
        if not math.isnan(half):
            rows["95 % interval"] = interval(self.mean, half, float(low), float(high))
        rows["queries"] = f"{len(known):,}, from {low:.3g} to {high:.3g}"
        return facts("Estimate", rows)

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        return f"{format(self.mean, spec)} ± {format(self.ci95, spec.replace('+', ''))}"

    def _standard_error(self) -> float:
        count = len(self.per_query) - self.undefined
        return float(np.nanstd(self.per_query, ddof=1)) / math.sqrt(count) if count > 1 else math.nan


def paired(a: Estimate, b: Estimate) -> Estimate:
    """Compute the difference b − a, query by query, which is less noisy than two separate intervals.

    Both must be measured on the same queries in the same order. A query undefined in either is undefined in the
    difference. If both have a bootstrap over the same draws of subsets, so has the difference.

    >>> a, b = Estimate(np.array([0.1, 0.5, 0.3])), Estimate(np.array([0.2, 0.7, 0.4]))
    >>> print(paired(a, b))
    0.13 ± 0.14
    """
    if len(a.per_query) != len(b.per_query):
        raise UndeError(
            f"cannot pair {len(a.per_query)} queries with {len(b.per_query)}: "
            "both estimates must come from the same queries in the same order"
        )
    difference, one, other = b.per_query - a.per_query, a.subset_bootstrap, b.subset_bootstrap
    if one is None and other is None:
        return Estimate(difference)
    if one is None or other is None or one.key != other.key:
        raise UndeError(
            "the two estimates do not share their bootstrap draws of subsets: compute both with the same "
            "masks, utility, bootstrap= and seed=, or both with bootstrap=0"
        )
    return Estimate(difference, SubsetBootstrap(other.means - one.means, one.subsets, one.key))


def two_way_estimate(values: np.ndarray) -> Estimate:
    """The mean over seeds of each query, of values (Q, R), with a bootstrap over seeds.

    Its draws are widened by R / (R − 1), and its number of subsets gives the interval the degrees of freedom of
    Welch and Satterthwaite: a few seeds count only as far as they differ.
    """
    queries, count = values.shape
    if count < 2:
        return Estimate(values[:, 0])
    draws = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    by_seed, mean = values.mean(0), values.mean()
    means = mean + (by_seed[draws].mean(1) - mean) * np.sqrt(count / (count - 1))
    a, b = values.mean(1).var(ddof=1) / queries if queries > 1 else 0.0, means.var(ddof=1)
    degrees = (a + b) ** 2 / (a**2 / max(1, queries - 1) + b**2 / (count - 1)) if a + b > 0 else count - 1
    return Estimate(values.mean(1), SubsetBootstrap(means, 1 + int(degrees), f"{count} seeds"))


def signed(e: Estimate) -> str:
    """A difference in words.

    >>> signed(Estimate(np.array([-0.1, -0.3])))
    '−0.2 ± 1.3'
    """
    half = e.ci95 if e.ci95_total is None else e.ci95_total
    return f"{e.mean:+.3g} ± {half:.2g}".replace("-", "−")


def quantile(level: float, degrees: int) -> float:
    """Quantile of Student's t; infinite without degrees of freedom."""
    from scipy.special import stdtrit  # scipy is slow to import

    return float(stdtrit(degrees, level)) if degrees > 0 else math.inf


def _or_none(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else value


def _two_digits(value: float, width: float) -> str:
    """`value` rounded where `width` has its second significant digit."""
    if not width > 0:
        return f"{value:.4g}"
    return f"{value:.{max(0, 1 - math.floor(math.log10(width)))}f}"
