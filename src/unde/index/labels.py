"""Wrong labels: training examples that are at odds with the rest of the training set, and what the model says of them.

Three rankings, each a number for every training example i, high where its label is suspicious:

    self-influence  τ(i, i): how much the model had to bend for this example alone
    normalised      τ(i, i) / Σ of the m largest τ(i, n): the share of it that no other example explains (the paper's)
    opposition      −Σ of the m smallest τ(i, n): how hard others pull against it, first among them those that look
                    alike and carry another label
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde import console
from unde.data import Rows, to_device
from unde.errors import UndeError, unknown
from unde.evaluate import mislabel_auc
from unde.features.guard import untouched
from unde.features.units import placement
from unde.methods import Method
from unde.scores import GroupScores, Top
from unde.scores.group_scores import WeightsLike
from unde.scores.table import Table
from unde.store.remote import Place
from unde.tasks import Classification, TokenClassification
from unde.tasks.base import Task
from unde.tasks.tokens import IGNORE

if TYPE_CHECKING:
    from unde.index.index import Index

RANKINGS = ("normalised", "self-influence", "opposition")
TOP = 10  # m, as in the paper for ResNets
_PASS = 64  # examples


@dataclass(frozen=True, eq=False)
class Suspects:
    """Every training example with its label, the model's answer, and how suspicious the label is."""

    scores: Tensor  # (N,), high: suspicious
    given: Tensor  # (N,) class numbers
    predicted: Tensor  # (N,)
    classes: int  # that the model tells apart
    ids: Sequence[Any]
    order: Tensor  # positions, the most suspicious first; without the examples that the index has skipped
    ranking: str

    def wrong(self, true: Any) -> Tensor:
        """(N,) bool: labels that differ from the true ones, which are class numbers too."""
        known = torch.as_tensor(true)
        if known.shape != self.given.shape or known.is_floating_point():
            raise UndeError(
                f"true labels are {known.dtype} of shape {tuple(known.shape)}: expected a class number for each of "
                f"the {len(self.given)} training examples"
            )
        return known.cpu() != self.given

    def auc(self, true: Any) -> float:
        """The chance that a wrong label ranks above a right one, where the true labels (N,) are known."""
        return mislabel_auc(self.scores[self.order], self.wrong(true)[self.order])

    def to_csv(self, path: str | Place, classes: Sequence[str] | None = None) -> None:
        """All examples, the most suspicious first: id, index, score, given, predicted. `classes` names the labels."""
        names = range(self.classes) if classes is None else classes
        if len(names) != self.classes:
            raise UndeError(
                f"{len(names)} names of classes, the model tells {self.classes} apart: expected one each"
            )
        order = self.order.tolist()
        table = {
            "id": [self.ids[i] for i in order],
            "index": order,
            "score": self.scores[self.order].tolist(),
            "given": [names[c] for c in self.given[self.order].tolist()],
            "predicted": [names[c] for c in self.predicted[self.order].tolist()],
        }
        Table(table).save(path, "csv")


def wrong_labels(
    index: Index,
    weights: WeightsLike = None,
    *,
    by: str = "normalised",
    top: int = TOP,
    method: str | Method | None = None,
    progress: bool = True,
) -> Suspects:
    """Training examples of a classifier ranked by how suspicious their labels are.

    The index must have been opened with its model, task and training data. `by` is the ranking (see above), `top` its
    m. An example that is hard, rare or unlike all others is suspicious too: look before you change a label.

    >>> suspects = wrong_labels(index)  # doctest: +SKIP
    >>> suspects.order[:10], suspects.to_csv("suspects.csv")  # doctest: +SKIP
    """
    if by not in RANKINGS:
        raise unknown("ranking of labels", by, RANKINGS)
    task, model, rows = classifier(index.task), index.model, index.train_data
    if model is None or rows is None:
        raise UndeError(
            "looking for wrong labels needs the model and its training data: pass model=, task= and train_data= to "
            "Index.open"
        )
    usable = ~index.skipped
    top = min(top, int(usable.sum()))
    chosen = index.method_for(method)
    if by == "opposition":
        scores = -_sums(index, chosen, weights, top)
    else:
        scores = index.self_influence(weights, top if by == "normalised" else None, method=chosen)
    said = answers(model, task, rows, progress=progress)
    order = scores.argsort(descending=True, stable=True)
    ids = range(len(index)) if index.ids is None else index.ids
    return Suspects(scores, said.given, said.predicted, said.classes, ids, order[usable[order]], by)


def classifier(task: Task | None) -> Classification | TokenClassification:
    """The task of an index, where it has labels to doubt."""
    if isinstance(task, (Classification, TokenClassification)):
        return task
    found = "an index that was opened without its task" if task is None else f"{type(task).__name__}"
    raise UndeError(
        "wrong labels are looked for where there are labels, under unde.tasks.Classification or TokenClassification: "
        f"this is {found}. "
        "index.self_influence() ranks the examples of any task"
    )


@dataclass(frozen=True, eq=False)
class Answers:
    """The labels that examples carry and those that the model gives them."""

    given: Tensor  # (N,) class numbers
    predicted: Tensor  # (N,)
    classes: int  # that the model tells apart


def answers(
    model: nn.Module, task: Classification | TokenClassification, rows: Rows, *, progress: bool = False
) -> Answers:
    """What a classifier says of some examples, and what they are labelled; where every token has a label, of the token
    of each example whose label the model finds least likely."""
    device, _ = placement(model)
    given, predicted, classes = [], [], 0
    bar = console.progress("predictions", len(rows), progress, unit="examples")
    with untouched(model), torch.no_grad(), bar as advance:
        for start in range(0, len(rows), _PASS):
            batch = to_device(rows.batch(range(start, min(start + _PASS, len(rows)))), device)
            logits, labels = _asked(task, model, batch)
            given.append(labels.long().cpu())
            predicted.append(logits.argmax(1).cpu())
            classes = logits.shape[1]
            advance(len(labels))
    return Answers(torch.cat(given), torch.cat(predicted), classes)


def _asked(task: Classification | TokenClassification, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """(B, classes) logits and the (B,) labels they are compared with."""
    if isinstance(task, Classification):
        return task.predicted(model, batch)
    logits, target, _ = task.predictions(model, batch)
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), target.flatten(), reduction="none", ignore_index=IGNORE
    )
    at = losses.view(target.shape).masked_fill(target == IGNORE, -1.0).argmax(1)
    rows = torch.arange(len(at), device=at.device)
    return logits[rows, at], target[rows, at]


def neighbours(
    index: Index,
    where: Sequence[int],
    count: int = 5,
    weights: WeightsLike = None,
    method: str | Method | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """The training examples that pull the same way as each of those at `where`, and those that pull against it, the
    strongest first: `count` positions each, without the example itself. The model is not asked."""
    chosen, usable = index.method_for(method), len(index) - int(index.skipped.sum())
    if not len(where) or usable < 2:
        return [[] for _ in where], [[] for _ in where]
    count = min(count, usable - 1)
    scores = _against_all(index, chosen, torch.as_tensor(where))

    def others(top: Top) -> list[list[int]]:
        return [
            [n for n in row if n != i][:count] for i, row in zip(where, top.indices.tolist(), strict=True)
        ]

    return others(scores.top(count + 1, weights)), others(scores.top(count + 1, weights, largest=False))


def _against_all(index: Index, method: Method, where: Tensor) -> GroupScores:
    """Scores of training examples as queries, from the features that the index holds of them."""
    at = index._opened
    return at.scorer.scores(method, at.stored.rows(where), [""] * len(where))


def _sums(index: Index, method: Method, weights: WeightsLike, count: int) -> Tensor:
    """(N,) the sum of the `count` smallest scores of each training example, as many at a time as the budget holds."""
    m = index.manifest
    step = max(1, index._opened.stored.memory // (16 * m.width * m.terms))
    parts = [
        _against_all(index, method, part).top(count, weights, largest=False).values.sum(1)
        for part in torch.arange(len(index)).split(step)
    ]
    return torch.cat(parts)
