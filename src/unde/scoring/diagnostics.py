"""Signs that scores say little: gradients of zero, a model that has not fitted its data, lists that are all alike.

Pure functions of what an index and its scores hold; `Index.diagnose` puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unde.scoring.documents import Pieces
from unde.scoring.top import Top

TOP = 10  # training examples in the lists that are compared
FEWEST = 4  # queries from which on lists are compared
_FLAT = (
    "Training examples with a score of 0 are neither proponents nor opponents. The loss does not change there, as "
    "where a margin is met."
)
_NAMED = 5  # queries or examples in a sentence
# A mean loss above this share of what guessing has is no fit. Of two outcomes, noise alone may leave much of it.
UNFITTED, UNFITTED_OF_TWO = 2 / 3, 0.9


def zero_gradient_queries(features: Tensor) -> list[int]:
    """Positions of the queries whose features (C, Q, D) are all zero: every score of theirs is 0.

    >>> import torch
    >>> zero_gradient_queries(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]))
    [1]
    """
    return (~features.any(2).any(0)).nonzero()[:, 0].tolist()


def unfitted(loss: float, outcomes: int) -> bool:
    """Whether a mean cross-entropy is so near to that of a uniform guess that little was learned.

    >>> unfitted(2.2, 10), unfitted(0.3, 10), unfitted(0.5, 2)
    (True, False, False)
    """
    share = UNFITTED_OF_TWO if outcomes == 2 else UNFITTED
    return outcomes > 1 and loss > share * math.log(outcomes)


def hub_examples(top: Tensor, examples: int) -> list[tuple[int, int]]:
    """Training examples that are in the top lists (Q, k) of more than half of the queries, and of how many; the most
    frequent first. `examples` is how many there are to choose from: lists of a large share of them are not compared.

    >>> import torch
    >>> hub_examples(torch.tensor([[7, 1], [7, 2], [3, 7], [7, 4], [5, 6]]), 100)
    [(7, 4)]
    >>> hub_examples(torch.tensor([[7, 1], [7, 2], [3, 4], [5, 4], [5, 6]]), 100)
    []
    """
    queries, k = top.shape
    if queries < FEWEST or not k or 10 * k > examples:
        return []
    numbers, counts = top.flatten().unique(return_counts=True)  # in a list each is once
    often = (counts > max(queries / 2, FEWEST - 1)).nonzero()[:, 0]
    pairs = zip(numbers[often].tolist(), counts[often].tolist())
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def mean_overlap(top: Tensor) -> float:
    """How many training examples the lists (Q, k) of two queries share on average.

    >>> import torch
    >>> mean_overlap(torch.tensor([[0, 1], [0, 2], [0, 1]]))
    1.3333333333333333
    """
    queries = len(top)
    counts = top.flatten().unique(return_counts=True)[1].double()
    return float((counts * (counts - 1)).sum()) / (queries * (queries - 1))


def describe_scores(
    zero: list[int], names: Sequence[Any], queries: Pieces | None, top: Top | None, examples: int, ids: Any
) -> list[str]:
    """Sentences about queries without a gradient, by their row, and about lists that are all alike."""
    found = []
    if queries is not None:
        zero = [q for q in range(len(queries)) if set(queries.rows(q)) <= set(zero)]
        names = queries.names
    if zero:
        found.append(describe_zero_queries([names[q] for q in zero], len(names)))
    if top is not None:
        usable = [q for q in range(len(top.indices)) if q not in set(zero)]
        lists = top.indices[usable, : min(TOP, examples // 10)]
        if hubs := hub_examples(lists, examples):
            found.append(describe_hubs(hubs, lists, ids))
    return found


# --- in words -------------------------------------------------------------------------------------------


def describe_zero_queries(names: Sequence[Any], queries: int) -> str:
    """A sentence about the queries `names` of `queries`.

    >>> describe_zero_queries([3], 8)[:60]
    '1 of 8 queries has a gradient of zero (query 3): all its sco'
    """
    one = len(names) == 1
    if queries == 1:
        return "The query has a gradient of zero: all its scores are 0. " + _FLAT
    which = f"{'query' if one else 'queries'} {_list(names)}"
    return (
        f"{len(names):,} of {queries:,} queries {'has' if one else 'have'} a gradient of zero ({which}): all "
        f"{'its' if one else 'their'} scores are 0. {_FLAT}"
    )


def describe_zero_examples(count: int, examples: int) -> str:
    """A sentence about training examples without a gradient."""
    has, their = ("has", "its") if count == 1 else ("have", "their")
    what = f"{count:,} of {examples:,} training examples {has} a gradient of zero"
    return f"{what}: {their} scores are 0 for all queries."


def describe_unfitted(loss: float, outcomes: int) -> str:
    """A sentence about a model whose mean training loss is near that of a guess."""
    return (
        f"The model has hardly fitted its training data: the mean training loss is {loss:.2f}, a uniform guess among "
        f"{outcomes:,} outcomes has {math.log(outcomes):.2f}. Scores tell what training did, and it did little here: "
        "train longer, or check that these are the trained weights."
    )


def describe_hubs(hubs: Sequence[tuple[int, int]], top: Tensor, names: Sequence[Any] | None = None) -> str:
    """A sentence about lists that hardly depend on the query."""
    queries, k = top.shape
    labels = [str(i if names is None else names[i]) for i, _ in hubs]
    most = hubs[0][1]
    which = (
        f"training example {labels[0]} is in {most} of {queries} lists"
        if len(hubs) == 1
        else f"{len(hubs)} training examples ({_list(labels)}) are in more than half of {queries} lists each"
    )
    return (
        f"The top {k} hardly depend{'s' if k == 1 else ''} on the query: {which}, and two lists share "
        f"{mean_overlap(top):.1f} of {k} on average. If the queries have little in common, this says more about these "
        "examples, such as large gradients, than about the queries: try a larger damping, another method, or "
        "method='tracin' with cosine=True."
    )


def _list(names: Sequence[Any]) -> str:
    return ", ".join(str(n) for n in names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
