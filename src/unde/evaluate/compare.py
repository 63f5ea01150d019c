"""Does weighting help? The same queries scored without and with learned weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from unde.evaluate.arrays import Array
from unde.evaluate.estimate import Estimate, paired
from unde.evaluate.lds import lds
from unde.scoring.arrays import as_scores
from unde.scoring.data_splits import LearnedWeights, refuse_seen, refuse_training

W = TypeVar("W", bound=LearnedWeights)
W_contra = TypeVar("W_contra", bound=LearnedWeights, contravariant=True)


class Scored(Protocol[W_contra]):
    """Scores that can be totalled with and without weights, and that know their queries by content."""

    @property
    def query_digests(self) -> Sequence[str]: ...

    def total(self, weights: W_contra | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class Comparison:
    """LDS without weights, with weights, and the paired difference (weighted − unweighted).

    `checked` says whether the queries were known to be disjoint from those the weights were learned on;
    False if the weights do not remember their queries.
    """

    unweighted: Estimate
    weighted: Estimate
    checked: bool

    @property
    def difference(self) -> Estimate:
        """Weighted − unweighted, query by query."""
        return paired(self.unweighted, self.weighted)

    def as_dict(self) -> dict[str, object]:
        """The three summaries, ready for JSON."""
        return {
            "unweighted": self.unweighted.as_dict(),
            "weighted": self.weighted.as_dict(),
            "difference": self.difference.as_dict(),
            "queries_checked": self.checked,
        }

    def __str__(self) -> str:
        rows = {"unweighted": self.unweighted, "weighted": self.weighted, "difference": self.difference}
        lines = [f"{'LDS, %':<12}{'mean':>8}{'± queries':>12}{'± queries and subsets':>24}"]
        for name, e in rows.items():
            sign = "+" if name == "difference" else ""
            total = "" if e.ci95_total is None else f"{100 * e.ci95_total:.2f}"
            lines.append(f"{name:<12}{100 * e.mean:>{sign}8.2f}{100 * e.ci95:>12.2f}{total:>24}")
        count, undefined = len(self.weighted.per_query), self.difference.undefined
        note = f", undefined for {undefined} of them" if undefined else ""
        lines.append(f"95 % intervals (half widths), {count} queries{note}")
        if not self.checked:
            lines.append("not checked: whether the weights were learned on some of these queries")
        return "\n".join(lines)


def compare(
    scores: Scored[W] | Array,
    weights: W,
    masks: Array,
    utility: Array,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
) -> Comparison:
    """LDS of the same scores without and with weights, on queries that the weights have never seen.

    `scores` are those of an index, or of another library, as an array (Q, N, M) or `unde.scoring.from_arrays`.
    `masks` (S, N) and `utility` (S, Q) are those of `lds`. Queries that the weights were learned on are
    refused, since on them the weights look better than they are, and so are training examples. The subsets
    are resampled `bootstrap` times, the same draws for both, so that the intervals also cover the noise of
    the subsets; 0 for none.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> truth, noise = rng.normal(size=(2, 5, 40))
    >>> masks = rng.random((30, 40)) < 0.5
    >>> scores = SimpleNamespace(
    ...     query_digests=["a", "b", "c", "d", "e"],
    ...     total=lambda weights=None: truth + (noise if weights else 3 * noise),
    ... )
    >>> weights = SimpleNamespace(query_digests=["x", "y"])
    >>> result = compare(scores, weights, masks, masks @ truth.T)
    >>> result.difference.mean > 0.2
    True
    """
    found: Any = as_scores(scores)
    refuse_training(found)
    checked = refuse_seen(found.query_digests, weights) if isinstance(weights, LearnedWeights) else False
    uniform = None  # weights of a calibration would be used by default
    if getattr(found, "default_weights", None) is not None:
        uniform = torch.ones(len(found.groups))
    unweighted, weighted = (
        lds(found.total(weights=w), masks, utility, bootstrap=bootstrap, seed=seed)
        for w in (uniform, weights)
    )
    return Comparison(unweighted, weighted, checked)
