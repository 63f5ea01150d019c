"""Fine-grained attribution: Recall@k for each attribute of an image, under the weights learned for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unde.errors import UndeError
from unde.evaluate.arrays import Array, numbers
from unde.evaluate.compare import ComparableScores
from unde.evaluate.estimate import Estimate, paired
from unde.evaluate.recall import check_contributors, rank, recall_at_k, skipped_examples
from unde.scoring.data_splits import LearnedWeights, refuse_seen, refuse_training

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
    scores: ComparableScores,
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


def _rank_by(scores: ComparableScores, name: str, target: Any, k: int) -> Array:
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
