"""Compare scores without and with learned weights: by LDS, or by Recall@k for each attribute of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unde.errors import UndeError
from unde.evaluate.arrays import Array, numbers
from unde.evaluate.estimate import Estimate, paired
from unde.evaluate.metrics import check_contributors, lds, rank, recall_at_k, skipped_examples
from unde.scoring.arrays import as_scores
from unde.scoring.base import Scores
from unde.scoring.data_splits import LearnedWeights, refuse_seen, refuse_training


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
    scores: Scores | Array,
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
    checked = isinstance(weights, LearnedWeights) and refuse_seen(resolved.query_digests, weights)
    by_default = getattr(resolved, "default_weights", None)  # those of a calibration
    uniform = None if by_default is None else torch.ones(len(resolved.groups))
    unweighted, weighted = (
        lds(resolved.total(weights=w), masks, utility, bootstrap=bootstrap, seed=seed)
        for w in (uniform, weights)
    )
    return Comparison(unweighted, weighted, checked)


UNWEIGHTED = "none"
ALL = "all"


@dataclass(frozen=True, eq=False)
class FineGrained:
    """Recall@k of each target for each attribute.

    Attributes:
        recall: Recall@k by target and attribute; the attribute "all" is their sum.
        k: Number of top-ranked examples.
        unweighted: The target without weights.
        checked: Whether the queries are known to be disjoint from those the weights were learned on.
    """

    recall: dict[str, dict[str, Estimate]]
    k: int
    unweighted: str
    checked: bool

    @property
    def difference(self) -> dict[str, dict[str, Estimate]]:
        """Each other target − unweighted, query by query."""
        plain = self.recall[self.unweighted]
        return {
            target: {attribute: paired(plain[attribute], e) for attribute, e in row.items()}
            for target, row in self.recall.items()
            if target != self.unweighted
        }

    def as_dict(self) -> dict[str, object]:
        """Everything that is printed, ready for JSON."""
        return {
            "k": self.k,
            "unweighted": self.unweighted,
            "recall": _summaries(self.recall),
            "difference": _summaries(self.difference),
            "queries_checked": self.checked,
        }

    def __str__(self) -> str:
        out = self._format(f"Recall@{self.k}, %", self.recall, ".1f")
        if len(self.recall) > 1:
            out += ["", *self._format(f"− {self.unweighted}", self.difference, "+.1f"), ""]
        queries = len(self.recall[self.unweighted][ALL].per_query)
        out.append(f"95 % intervals (half widths), {queries} queries")
        if not self.checked:
            out.append("not checked: whether the weights were learned on some of these queries")
        return "\n".join(out)

    def _format(self, title: str, table: dict[str, dict[str, Estimate]], spec: str) -> list[str]:
        """Lines of a table, in columns as wide as those of both tables."""
        width = 2 + max(map(len, (*self.recall, f"Recall@{self.k}, %", f"− {self.unweighted}")))
        columns = {a: max(15, len(a) + 2) for a in self.recall[self.unweighted]}
        lines = [title.ljust(width) + "".join(a.rjust(w) for a, w in columns.items())]
        for target, row in table.items():
            cells = [f"{100 * e.mean:{spec}} ± {100 * e.ci95:.1f}".rjust(columns[a]) for a, e in row.items()]
            lines.append(target.ljust(width) + "".join(cells))
        return lines


def fine_grained(
    scores: Scores,
    targets: Mapping[str, Any],
    relevant: Mapping[str, Array],
    *,
    k: int = 10,
) -> FineGrained:
    """Compute Recall@k for each attribute of the queries, under each of several weights.

    Args:
        scores: Scores of an index.
        targets: What to rank by: learned weights, None for no weights, or the (Q, N) totals of a baseline such as
            `representation_distance`. Differences are to None, which is added as "none" if no target is.
        relevant: (Q, N) contributors of each query to each attribute.
        k: Number of top-ranked examples.

    Returns:
        The recall of each target for each attribute and for "all", the sum over attributes: the share of the top k that
        contributed anything, if no training example contributes to two attributes of a query.

    Raises:
        UndeError: Queries are training examples or were used to learn weights, or shapes do not fit.

    Example:
        >>> import torch, unde
        >>> scores = unde.scoring.from_arrays(torch.eye(4)[:, :, None] * torch.tensor([1.0, -2.0]))
        >>> subject = unde.Weights(torch.tensor([2.0, 0.0]), scores.groups)
        >>> result = fine_grained(scores, {"subject": subject}, {"subject": torch.eye(4)}, k=1)
        >>> result.recall["none"]["subject"].mean, result.recall["subject"]["subject"].mean
        (0.0, 1.0)
    """
    if ALL in relevant:
        raise UndeError(f"an attribute is called {ALL!r}, which names the sum over them: choose another name")
    truth = check_contributors(relevant, scores.shape)
    unweighted = next((name for name, target in targets.items() if target is None), None)
    if unweighted is None:
        if UNWEIGHTED in targets:
            raise UndeError(
                f"target {UNWEIGHTED!r} is a {type(targets[UNWEIGHTED]).__name__}: that name is for no weights. "
                "Pass None there, or choose another name"
            )
        unweighted, targets = UNWEIGHTED, {UNWEIGHTED: None, **targets}
    refuse_training(scores)
    checks = [  # a list, so that each is checked even after one that does not remember its queries
        refuse_seen(scores.query_digests, target, f"the weights of target {name!r}")
        for name, target in targets.items()
        if isinstance(target, LearnedWeights)
    ]
    recall = {}
    for name, target in targets.items():
        top = _rank_by(scores, name, target, k)
        row = {attribute: recall_at_k(top, marks) for attribute, marks in truth.items()}
        recall[name] = {**row, ALL: Estimate(np.sum([e.per_query for e in row.values()], axis=0))}
    return FineGrained(recall, k, unweighted, checked=all(checks))


def _rank_by(scores: Scores, name: str, target: Any, k: int) -> Array:
    """(Q, k) the highest-ranked training examples of each query."""
    if target is None or isinstance(target, LearnedWeights):
        return scores.top(k, target).indices
    total = numbers(target, f"target {name!r}", "(Q, N)")
    if total.shape != tuple(scores.shape):
        raise UndeError(
            f"target {name!r} has shape {total.shape}: expected {tuple(scores.shape)}, as the scores have, for "
            "the totals of a baseline"
        )
    return rank(total, k, skipped_examples(scores))


def _summaries(table: dict[str, dict[str, Estimate]]) -> dict[str, dict[str, object]]:
    return {target: {a: e.as_dict() for a, e in row.items()} for target, row in table.items()}
