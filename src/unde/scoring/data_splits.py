"""Training, weight learning and evaluation need disjoint data.

Scoring training examples is allowed; fitting weights on them or evaluating with them raises, and so does using weights
on the queries they were learned from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

from unde.errors import UndeError
from unde.fingerprints import origins
from unde.scoring.documents import Pieces


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
    known = set(origins(others)) - {""}  # "" stands for no query
    return [position for position, digest in enumerate(digests) if not known.isdisjoint(origins([digest]))]


def refuse_shared(count: int, noun: str, where: str) -> None:
    """Raise if `count` examples of one role are in another."""
    if count:
        raise UndeError(
            f"{count} of the {noun} are also in {where}: training, weight learning and evaluation need disjoint data. "
            "Remove them from one of the two"
        )


def refuse_training(scores: Any) -> None:
    """Raise if queries to learn from or to evaluate with are training examples, where the scores can tell."""
    trained_on = getattr(scores, "trained_on", None)
    refuse_shared(0 if trained_on is None else len(trained_on()), "queries", "the training data")


def refuse_seen(query_digests: Sequence[str], weights: LearnedWeights, name: str = "the weights") -> bool:
    """Raise if the weights were learned on one of the queries; False if they do not remember theirs."""
    digests, learned = list(query_digests), weights.query_digests
    seen = shared(digests, learned)
    if seen:
        positions = ", ".join(map(str, seen[:10])) + (", …" if len(seen) > 10 else "")
        raise UndeError(
            f"{name} were learned on {len(seen)} of these {len(digests)} queries, at positions {positions}: "
            "evaluation needs queries of its own. Leave those out, or learn weights on others (weights.values are bare "
            "numbers, which nobody checks)"
        )
    return bool(digests and learned)


def describe_trained(trained: Sequence[int], queries: Pieces) -> str:
    """Which queries are training examples, in a sentence; "" for none. Asking about these is allowed.

    >>> from torch import tensor
    >>> describe_trained([1], Pieces(tensor([0, 1, 2]), ["a", "b", "c"]))[:42]
    '1 of 3 queries is also a training example:'
    """
    names = [str(queries.names[q]) for q in sorted({int(queries.of[row]) for row in trained})]
    if not names:
        return ""
    some = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    words = "is also a training example" if len(names) == 1 else "are also training examples"
    return f"{len(names)} of {len(queries)} queries {words}: {some} (`unde leaks` compares them)"
