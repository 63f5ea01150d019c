"""Choosing k and the weight decay from weight-learning queries alone, with no look at the evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unde import console
from unde.errors import UndeError
from unde.scoring.data_splits import refuse_training
from unde.weights.contributions import Contributions
from unde.weights.objective import WeightProblem, normalise
from unde.weights.protocol import ResolvedScores
from unde.weights.settings import Settings, fit


@dataclass(frozen=True)
class Candidate:
    """How weights learned with one k and weight decay did on queries that they had not seen.

    Both numbers are relative to the unweighted method, which has 1.
    """

    k: int
    weight_decay: float
    weighted: float  # the normalised mean score of what these weights rank highest
    unweighted: float  # the normalised mean score of what the unweighted method ranks highest

    @property
    def gain(self) -> float:
        """What candidates are compared by: the geometric mean of the two."""
        return (max(self.weighted, 0.0) * max(self.unweighted, 0.0)) ** 0.5


@dataclass(frozen=True)
class Choice:
    """The best k and weight decay; a gain of 1 or less says to stay with the unweighted method."""

    k: int
    weight_decay: float
    gain: float
    candidates: list[Candidate]

    def table(self) -> str:
        """All candidates, one to a line, the best marked.

        >>> best = Candidate(k=10, weight_decay=1.0, weighted=1.5, unweighted=1.1)
        >>> print(Choice(best.k, best.weight_decay, best.gain, [best]).table())
          k  weight decay  weighted  unweighted  gain
         10             1     1.500       1.100  1.285  *
        """
        lines = ["  k  weight decay  weighted  unweighted  gain"]
        for c in self.candidates:
            mark = "  *" if (c.k, c.weight_decay) == (self.k, self.weight_decay) else ""
            gains = f"{c.weighted:.3f}       {c.unweighted:.3f}  {c.gain:.3f}"
            lines.append(f"{c.k:3d}  {c.weight_decay:12g}     {gains}{mark}")
        return "\n".join(lines)


def choose(
    scores: ResolvedScores,
    ks: Sequence[int] = (5, 10, 20, 50),
    weight_decays: Sequence[float] = (0.1, 0.3, 1.0, 3.0, 10.0),
    solver: str | None = None,
    folds: int = 2,
    seed: int = 0,
) -> Choice:
    """Try every k with every weight decay, and judge the weights on queries left out of the learning.

    The judge is the normalised top-k objective at one k for all candidates, the largest of `ks`, in two
    ways. By the weights' own top k, weights can confirm themselves: favouring any one group sharpens the
    top. By the unweighted method's top k they cannot, but its positives were picked with its own noise,
    which favours standing still. The two err in opposite directions, so candidates are compared by the
    geometric mean. It is still a judgement from scores alone; retraining is the only full test.

    >>> from unde.scoring.arrays import ArrayScores
    >>> generator = torch.Generator().manual_seed(0)
    >>> influence = torch.randn(40, 200, generator=generator).relu()**3
    >>> noise = 3 * torch.randn(40, 200, generator=generator)
    >>> scores = ArrayScores(torch.stack([influence, noise], dim=2), groups=["signal", "noise"])
    >>> best = choose(scores, ks=[5, 10], weight_decays=[0.01, 100.0])
    >>> best.weight_decay, best.gain > 1
    (0.01, True)
    """
    refuse_training(scores)
    candidates = [Settings(k, decay, solver=solver, seed=seed) for k in ks for decay in weight_decays]
    if not candidates:
        raise UndeError("nothing to choose from: expected at least one k and one weight decay")
    for settings in candidates:
        settings.check(scores)
    if not 2 <= folds <= scores.shape[0]:
        raise UndeError(f"folds is {folds}: expected 2 to {scores.shape[0]}, the number of queries")
    data = Contributions(scores)
    judged = torch.zeros(len(candidates) + 1, 2)  # sums over queries; the last row is the unweighted method
    with console.progress("choosing k and weight decay", folds, unit="folds") as advance:
        for learned_from, held_out in _folds(data.queries, folds, seed):
            fits = fit([WeightProblem(data, learned_from, c.k, c.loss) for c in candidates], candidates)
            weights = [*(f.weights for f in fits), torch.ones(data.groups)]
            judged += _judge(data, held_out, weights, max(ks))
            advance(1)
    if judged[-1, 0] <= 0:
        raise UndeError(
            f"the {max(ks)} highest unweighted scores are negative on average, so nothing can be compared to "
            "them: expected proponents among the training examples. Try smaller ks, or check the sign"
        )
    weighted, unweighted = (judged[:-1] / judged[-1]).T.tolist()
    table = [Candidate(s.k, s.weight_decay, w, u) for s, w, u in zip(candidates, weighted, unweighted)]
    best = max(table, key=lambda candidate: candidate.gain)
    return Choice(best.k, best.weight_decay, best.gain, table)


def _folds(queries: int, folds: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sorted (queries to learn from, queries held out), each query held out once."""
    order = torch.randperm(queries, generator=torch.Generator().manual_seed(seed))
    for fold in range(folds):
        held_out = torch.zeros(queries, dtype=torch.bool)
        held_out[order[fold::folds]] = True
        yield (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def _judge(data: Contributions, queries: Tensor, weights: Sequence[Tensor], k: int) -> Tensor:
    """Sums over queries of normalised mean scores: of the weights' own top k, of the unweighted: (c, 2). The last of
    the weights are uniform."""
    total = torch.zeros(len(weights), 2)
    for _, scores in data.scores("judging", queries, weights, (16 + 4 * len(weights)) * data.examples):
        top = scores[-1].topk(k).indices
        for row, of_weights in zip(total, map(normalise, scores)):
            row[0] += of_weights.topk(k).values.mean(1).sum()
            row[1] += of_weights.gather(1, top).mean(1).sum()
    return total
