"""Whose training data it was: totals and shares of influence by author, domain, file or label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.console import counted
from unde.evaluate.estimate import Estimate
from unde.scoring.base import Names, Scores, WeightsLike
from unde.scoring.documents import name_pieces
from unde.scoring.top import Table


@dataclass(frozen=True, eq=False)
class SourceShares:
    """Totals and shares of influence by source; intervals are over queries.

    Attributes:
        names: The sources, the largest share first.
        examples: How many training examples each has.
        totals: Its summed scores.
        shares: Its share of all positive scores of a query.

    >>> from unde.scoring import from_arrays
    >>> source_shares(from_arrays(torch.tensor([[[3.0], [1.0], [-1.0]]])), ["ann", "bob", "bob"]).names
    ['ann', 'bob']
    """

    names: list[Any]
    examples: list[int]
    totals: list[Estimate]
    shares: list[Estimate]

    def __repr__(self) -> str:
        return (
            f"SourceShares({counted(len(self.names), 'source')}: {self.names[0]!r} {self.shares[0]:.1%}, …)"
        )

    def table(self) -> Table:
        """A row for each source: examples, share_of_examples, total, share, and half widths of 95 % intervals."""
        count = sum(self.examples)
        return Table(
            {
                "source": self.names,
                "examples": self.examples,
                "share_of_examples": [n / count for n in self.examples],
                "total": [e.mean for e in self.totals],
                "total_ci95": [e.ci95 for e in self.totals],
                "share": [e.mean for e in self.shares],
                "share_ci95": [e.ci95 for e in self.shares],
            }
        )


def source_shares(
    scores: Scores, by: Names, weights: WeightsLike = None, *, queries: Names | None = None
) -> SourceShares:
    """Add up influence by the source of each training example.

    Args:
        scores: Scores of some queries.
        by: The source of each training example: its author, domain, file or label; `unde.scoring.documents(index.ids)`
            for documents.
        weights: Weights of the groups. None: those of a calibration, or all ones.
        queries: Names of the queries. Scores of queries with one name are added up first.

    Returns:
        Of each source the mean over queries of its summed scores, and of its share of the positive scores.

    Raises:
        UndeError: Names or weights do not fit the scores.

    >>> from unde.scoring import from_arrays
    >>> shares = source_shares(from_arrays([[3.0, 1.0, -2.0], [1.0, 1.0, 0.0]]), ["ann", "bob", "ann"])
    >>> shares.names, [round(e.mean, 3) for e in shares.shares], [e.mean for e in shares.totals]
    (['ann', 'bob'], [0.625, 0.375], [1.0, 1.0])
    """
    sources = name_pieces(by, scores.shape[1], "training examples")
    wholes = name_pieces(range(len(scores)) if queries is None else queries, len(scores), "queries")
    w, skipped = scores.align_weights(weights), scores.skipped()
    totals, shares = np.zeros((len(sources), len(wholes))), np.zeros((len(sources), len(wholes)))
    for q in range(len(wholes)):
        values = (
            scores.select(torch.tensor(wholes.rows(q))).total(w).double().sum(0).masked_fill(skipped, 0.0)
        )
        positive = _sums(values.clamp(min=0), sources.of, len(sources))
        totals[:, q] = _sums(values, sources.of, len(sources))
        shares[:, q] = positive / positive.sum() if positive.sum() > 0 else 0.0
    order = np.argsort(-shares.mean(1), kind="stable").tolist()
    counts = torch.bincount(sources.of, minlength=len(sources)).tolist()
    return SourceShares(
        [sources.names[s] for s in order],
        [counts[s] for s in order],
        [Estimate(totals[s]) for s in order],
        [Estimate(shares[s]) for s in order],
    )


def _sums(values: Tensor, of: Tensor, count: int) -> np.ndarray:
    return torch.zeros(count, dtype=torch.float64).index_add_(0, of, values).numpy()


def describe_sources(shares: SourceShares) -> list[Sequence[str]]:
    """Rows for people: source, its share of the influence, its share of the examples, both in %."""
    return [
        [
            str(row["source"]),
            f"{row['share']:.1%}" + ("" if np.isnan(row["share_ci95"]) else f" ± {row['share_ci95']:.1%}"),
            f"{row['share_of_examples']:.1%}",
            f"{row['total']:+.3g}",
        ]
        for row in shares.table().rows()
    ]
