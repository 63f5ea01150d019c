"""Compare the LDS of the same scores without and with learned weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unde.evaluate.arrays import Array
from unde.evaluate.estimate import Estimate, paired
from unde.evaluate.lds import lds
from unde.scoring.arrays import as_scores
from unde.scoring.data_splits import LearnedWeights, refuse_seen, refuse_training


class ComparableScores(Protocol):
    """Scores with or without weights, such as those of an index or `unde.scoring.from_arrays`."""

    @property
    def query_digests(self) -> Sequence[str]: ...
    @property
    def shape(self) -> tuple[int, int]: ...  # (Q, N)

    def total(self, weights: Any = None) -> torch.Tensor: ...
    def top(self, k: int, weights: Any = None) -> Any: ...


@dataclass(frozen=True, eq=False)
class Comparison:
    """LDS without weights, with weights, and the paired difference.

    Attributes:
        unweighted: LDS without weights.
        weighted: LDS with weights.
        checked: Whether the queries are known to be disjoint from those the weights were learned on; False if the
            weights do not remember their queries.
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
    scores: ComparableScores | Array,
    weights: Any,
    masks: Array,
    utility: Array,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Compute the LDS of the same scores without and with weights, on queries that the weights have not seen.

    Args:
        scores: Scores of an index, or of another library as an array (Q, N, M) or `unde.scoring.from_arrays`.
        weights: LearnedWeights weights, such as `unde.learn_weights` returns.
        masks: (S, N) bool, the training examples of each retrained model.
        utility: (S, Q) utility of each model on each query, higher is better.
        bootstrap: Number of resamplings of the subsets, the same for both, so that intervals cover the noise of
            subsets too; 0 for none.
        seed: Seed of the resampling.

    Returns:
        Both estimates and their difference.

    Raises:
        UndeError: Queries are training examples or were used to learn the weights, or shapes do not fit.

    Example:
        >>> from unde import Weights
        >>> rng = torch.Generator().manual_seed(0)
        >>> truth, noise = torch.randn(2, 5, 40, generator=rng)
        >>> masks = torch.rand(30, 40, generator=rng) < 0.5
        >>> weights = Weights(torch.tensor([1.9, 0.1]), ["group 0", "group 1"])
        >>> result = compare(torch.stack([truth, noise], 2), weights, masks, masks.float() @ truth.T)
        >>> result.difference.mean > 0.2
        True
    """
    resolved: Any = as_scores(scores)
    refuse_training(resolved)
    checked = refuse_seen(resolved.query_digests, weights) if isinstance(weights, LearnedWeights) else False
    uniform = None
    if getattr(resolved, "default_weights", None) is not None:  # those of a calibration
        uniform = torch.ones(len(resolved.groups))
    unweighted, weighted = (
        lds(resolved.total(weights=w), masks, utility, bootstrap=bootstrap, seed=seed)
        for w in (uniform, weights)
    )
    return Comparison(unweighted, weighted, checked)
