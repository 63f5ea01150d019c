"""Three disjoint roles of data: training, learning weights from queries, evaluation. What shares an example is refused.

Scoring itself is no role: training examples may be asked about. Refused is to learn weights from them as if they were
queries, to measure with them, and to use weights on the very queries that they were learned from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

from unde.errors import UndeError
from unde.fingerprints import origins


@runtime_checkable
class LearnedWeights(Protocol):
    """Weights that remember the queries they were learned on."""

    @property
    def query_digests(self) -> Sequence[str]: ...


def shared(digests: Sequence[str], others: Collection[str]) -> list[int]:
    """Positions of the queries that are among others, by content.

    >>> shared(["a", "b", "", "c+a"], ["", "a"])
    [0, 3]
    """
    known = set(origins(others)) - {""}  # made up inside, of no query in particular
    return [position for position, digest in enumerate(digests) if not known.isdisjoint(origins([digest]))]


def refuse_shared(count: int, asked: str, where: str) -> None:
    """Raises if `count` examples of one role are in another."""
    if count:
        raise UndeError(
            f"{count} of the {asked} are also in {where}: training, weight learning and evaluation need disjoint data. "
            "Remove them from one of the two"
        )


def refuse_training(scores: Any, asked: str = "queries") -> None:
    """Raises if queries to learn from or to evaluate with are training examples, where the scores can tell."""
    trained_on = getattr(scores, "trained_on", None)
    refuse_shared(0 if trained_on is None else len(trained_on()), asked, "the training data")


def refuse_seen(query_digests: Sequence[str], weights: LearnedWeights, called: str = "the weights") -> bool:
    """Raises if the weights were learned on one of the queries; False if they do not remember theirs."""
    digests, learned = list(query_digests), weights.query_digests
    seen = shared(digests, learned)
    if seen:
        shown = ", ".join(map(str, seen[:10])) + (", …" if len(seen) > 10 else "")
        raise UndeError(
            f"{called} were learned on {len(seen)} of these {len(digests)} queries, at positions {shown}: "
            "evaluation needs queries of its own. Leave those out, or learn weights on others (weights.values are bare "
            "numbers, which nobody checks)"
        )
    return bool(digests and learned)
