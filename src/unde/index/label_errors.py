"""How likely each label is wrong, from the labels of its nearest neighbours.

Consider all pairs (i, c) of an example and a class, but for the class that most neighbours of i carry. A right label
hardly ever falls on a class that no neighbour suggests; a label that was replaced at random falls on every other class
equally often. So the share e of the least plausible pairs whose class is the label of the example is the rate of
replacement for each other class, and ε = (classes − 1) e the rate of wrong labels. Least plausible is the quarter of
the pairs with the fewest votes among many neighbours.

Let a(m) be the share of labels among the pairs with m votes of the 10 nearest. It counts right and wrong labels:

    a(m) = e + (1 − ε − e) t(m),    P(wrong | m) = e (1 − t(m)) / a(m),

with t(m) the chance that the class is right. Where classes overlap, t(m) is large and P(wrong) small. The example
itself is not among its neighbours. A model that was trained on wrong labels moves such examples towards each other, so
that neighbours agree with them: e is then too small, and so is P(wrong).

For a lower bound e comes from the tenth of the pairs with the fewest votes, of examples whose neighbours agree most
first, and is the 95 % confidence bound of a Poisson rate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unde.index.nearest import NEAREST, count_votes

_BLOCK = 4096  # examples whose votes are counted at once
_MANY = 50  # neighbours, at most
_QUARTER, _TENTH = 0.25, 0.1  # shares of pairs: for the estimate, for the lower bound
_NORMAL = 1.645  # 95 % quantile
_LARGEST = 0.9  # of the rate at which labels would say nothing


def neighbour_count(examples: int) -> int:
    """How many neighbours the estimate asks for.

    >>> neighbour_count(10_000), neighbour_count(300)
    (50, 25)
    """
    return max(NEAREST, min(_MANY, examples // 12))


def wrong_probability(neighbours: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """(N,) P(wrong) and (N,) its lower bound, of labels (N,) with the labels (N, k) of their neighbours, nearest first.

    >>> labels = torch.tensor([0] * 20 + [1] * 20 + [0])
    >>> neighbours = torch.tensor([[0] * 10] * 20 + [[1] * 10] * 21)
    >>> p, low = wrong_probability(neighbours, labels, 2)
    >>> round(float(p[-1]), 2), float(p[:-1].max())
    (1.0, 0.0)
    """
    few, k = min(NEAREST, neighbours.shape[1]), neighbours.shape[1]
    many = torch.zeros(
        2, (k + 1) ** 2, dtype=torch.int64
    )  # pairs and labels, by votes of c and those for the first
    near = torch.zeros(2, few + 1, dtype=torch.int64)  # by votes of c among the nearest
    own = torch.empty_like(labels)
    for some in torch.arange(len(labels)).split(_BLOCK):
        label, counts = labels[some, None], count_votes(neighbours[some], classes)
        top = counts.max(1, keepdim=True)
        group = counts * (k + 1) + (k - top.values)
        others = torch.ones_like(counts, dtype=torch.bool).scatter(1, top.indices, False)
        many[0] += torch.bincount(group[others], minlength=many.shape[1])
        many[1] += torch.bincount(group.gather(1, label)[others.gather(1, label)], minlength=many.shape[1])
        counts = count_votes(neighbours[some, :few], classes)
        own[some] = counts.gather(1, label)[:, 0]
        near[0] += torch.bincount(counts.flatten(), minlength=few + 1)
    near[1] = torch.bincount(own, minlength=few + 1)
    share = near[1].double() / near[0].clamp(min=1)  # a(m)
    hits, pairs = _least_plausible(many.view(2, k + 1, k + 1).sum(2), _QUARTER)
    rate = hits / pairs
    hits, pairs = _least_plausible(many, _TENTH)
    low = min(rate, _poisson_low(hits) / pairs)
    return _wrong(rate, share, classes)[own], _wrong(low, share, classes)[own]


def at_least(low: Tensor) -> int:
    """The number of wrong labels that is exceeded with 95 % confidence, by lower bounds of their probabilities.

    >>> at_least(torch.full((100,), 0.5)), at_least(torch.full((4,), 0.2))
    (38, 0)
    """
    expected = float(low.sum())
    return max(0, int(expected - _NORMAL * expected**0.5))


def _least_plausible(counts: Tensor, share: float) -> tuple[int, int]:
    """Hits and pairs among this share of the pairs (2, groups), the first groups; whole groups."""
    pairs, hits = counts[0].cumsum(0), counts[1].cumsum(0)
    last = int((pairs < share * pairs[-1]).sum().clamp(max=len(pairs) - 1))
    return int(hits[last]), max(1, int(pairs[last]))


def _wrong(rate: float, share: Tensor, classes: int) -> Tensor:
    """P(wrong | m) by shares a(m), at this rate of replacement for each other class."""
    rate = min(rate, _LARGEST / classes)
    right = ((share - rate) / (1 - classes * rate)).clamp(0, 1)
    return (rate * (1 - right) / share.clamp(min=1e-12)).clamp(0, 1)


def _poisson_low(count: int) -> float:
    """Lower 95 % confidence bound of the mean of a Poisson count."""
    from scipy.special import gammaincinv  # scipy is slow to import

    return float(gammaincinv(count, 0.05)) if count else 0.0
