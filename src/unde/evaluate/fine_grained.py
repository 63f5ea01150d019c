"""Fine-grained attribution: do weights for one aspect of an image find the training images that gave it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from unde.errors import UndeError
from unde.evaluate.arrays import Array, numbers
from unde.evaluate.estimate import Estimate, paired
from unde.evaluate.recall import contributors, ranked, recall_at_k, skipped
from unde.scoring.data_splits import LearnedWeights, refuse_seen, refuse_training

UNWEIGHTED = "none"
ALL = "all"

W = TypeVar("W", bound=LearnedWeights)
W_contra = TypeVar("W_contra", bound=LearnedWeights, contravariant=True)


class Best(Protocol):
    """The training examples that rank highest."""

    @property
    def indices(self) -> torch.Tensor: ...  # (Q, k)


class Ranking(Protocol[W_contra]):
    """Scores that can be ranked with and without weights, and that know their queries by content."""

    @property
    def query_digests(self) -> Sequence[str]: ...
    @property
    def shape(self) -> tuple[int, int]: ...  # (Q, N)

    def top(self, k: int, weights: W_contra | None = None) -> Best: ...


@dataclass(frozen=True, eq=False)
class FineGrained:
    """Recall@k of each weight target (or baseline) for each attribute, and for "all", their sum.

    `unweighted` is the target without weights; `checked` says whether the queries were known to be disjoint
    from those that the weights were learned on (False if weights do not remember their queries).
    """

    recall: dict[str, dict[str, Estimate]]  # target → attribute → Recall@k
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
        first = self.recall[self.unweighted]
        difference = f"− {self.unweighted}"
        width = 2 + max(map(len, (*self.recall, f"Recall@{self.k}, %", difference)))
        columns = [max(15, len(a) + 2) for a in first]

        def lines(title: str, table: dict[str, dict[str, Estimate]], spec: str) -> list[str]:
            head = title.ljust(width) + "".join(a.rjust(c) for a, c in zip(first, columns))
            return [head] + [
                target.ljust(width)
                + "".join(_percent(e, spec).rjust(c) for e, c in zip(row.values(), columns))
                for target, row in table.items()
            ]

        out = lines(f"Recall@{self.k}, %", self.recall, ".1f")
        if len(self.recall) > 1:
            out += ["", *lines(difference, self.difference, "+.1f"), ""]
        out.append(f"95 % intervals (half widths), {len(first[ALL].per_query)} queries")
        if not self.checked:
            out.append("not checked: whether the weights were learned on some of these queries")
        return "\n".join(out)


def fine_grained(
    scores: Ranking[W],
    targets: Mapping[str, W | Array | None],
    relevant: Mapping[str, Array],
    *,
    k: int = 10,
) -> FineGrained:
    """Recall@k for each attribute of the images, under each of several weights.

    `targets` names what to rank by: the weights learned for an attribute, None for no weights, or the (Q, N)
    totals of a baseline such as `representation_distance`. Differences are to None, which is added as "none"
    if no target is. `relevant` marks the contributors of each query to each attribute, (Q, N), as
    `Attributes.contributors` does. Queries that weights were learned on are refused, as in `compare`.

    "all" is the sum over the attributes: the share of the top k that contributed anything, if no training
    example contributes to two attributes of a query.

    >>> from types import SimpleNamespace
    >>> from unde import Weights
    >>> scores = SimpleNamespace(  # in earnest: index.score(queries)
    ...     query_digests=["a", "b", "c"],
    ...     shape=(3, 4),
    ...     top=lambda k, w=None: SimpleNamespace(indices=torch.tensor([[2, 1 if w else 3], [0, 1], [1, 2]])),
    ... )
    >>> style = Weights(torch.tensor([0.5, 1.5]), ["body", "head"], query_digests=["x", "y"])
    >>> relevant = {"style": np.array([[1, 1, 0, 0]] * 3), "subject": np.array([[0, 0, 1, 0]] * 3)}
    >>> found = fine_grained(scores, {"style": style, "baseline": -torch.eye(3, 4)}, relevant, k=2)
    >>> found.recall["style"]["style"].per_query
    array([0.5, 1. , 0.5])
    >>> print(found)
    Recall@2, %            style        subject            all
    none            50.0 ± 124.2    33.3 ± 71.7    83.3 ± 71.7
    style            66.7 ± 71.7    33.3 ± 71.7    100.0 ± 0.0
    baseline         66.7 ± 71.7    33.3 ± 71.7    100.0 ± 0.0
    <BLANKLINE>
    − none                 style        subject            all
    style           +16.7 ± 71.7     +0.0 ± 0.0   +16.7 ± 71.7
    baseline       +16.7 ± 143.4   +0.0 ± 124.2   +16.7 ± 71.7
    <BLANKLINE>
    95 % intervals (half widths), 3 queries
    """
    if ALL in relevant:
        raise UndeError(f"an attribute is called {ALL!r}, which names the sum over them: choose another name")
    truth = contributors(relevant, scores.shape)
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
        top = _top(scores, name, target, k)
        row = {attribute: recall_at_k(top, marks) for attribute, marks in truth.items()}
        recall[name] = {**row, ALL: Estimate(np.sum([e.per_query for e in row.values()], axis=0))}
    return FineGrained(recall, k, unweighted, checked=all(checks))


def _top(scores: Ranking[Any], name: str, target: Any, k: int) -> Array:
    """(Q, k) the highest-ranked training examples of each query."""
    if target is None or isinstance(target, LearnedWeights):
        return scores.top(k, target).indices
    total = numbers(target, f"target {name!r}", "(Q, N)")
    if total.shape != tuple(scores.shape):
        raise UndeError(
            f"target {name!r} has shape {total.shape}: expected {tuple(scores.shape)}, as the scores have, for "
            "the totals of a baseline"
        )
    return ranked(total, k, skipped(scores))


def _summaries(table: dict[str, dict[str, Estimate]]) -> dict[str, dict[str, object]]:
    return {target: {a: e.as_dict() for a, e in row.items()} for target, row in table.items()}


def _percent(e: Estimate, spec: str) -> str:
    return f"{100 * e.mean:{spec}} ± {100 * e.ci95:.1f}"
