"""Rankings of the training examples of a classifier by how suspicious their labels are.

A ranking gives a number to every training example i, high where its label y is suspicious:

    quality         −log of the geometric mean of p(y | x) and of the share of the nearest examples that carry y
    adjusted-loss   loss / √(mean loss of the examples labelled y): classes that the model finds hard count less
    loss            −log p(y | x), the baseline: the order of 1 − p(y | x)
    margin          the largest p(c | x) over c ≠ y, minus p(y | x)
    self-influence  τ(i, i): how much the model had to bend for this example alone
    normalised      τ(i, i) / Σ of the m largest τ(i, n): the share that no other example explains (the paper's)
    opposition      −Σ of the m smallest τ(i, n): how hard other examples pull against it

The losses and the margin need one pass of the model, the quality a second one for hidden states, the others the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde import console
from unde.data import Rows, to_device
from unde.default_device import program_default
from unde.errors import UndeError, unknown
from unde.evaluate import mislabel_auc
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import placement
from unde.index.label_errors import neighbour_count
from unde.index.nearest import NEAREST, nearest_labels
from unde.index.state import IndexState
from unde.methods import Method
from unde.scoring import Top, WeightsLike
from unde.tasks import Classification, TokenClassification
from unde.tasks.base import Task
from unde.tasks.tokens import IGNORE

TOP = 10  # m, as in the paper for ResNets
_PASS = 64  # examples


class LabelledIndex(Protocol):
    """What rankings ask of an index."""

    @property
    def _state(self) -> IndexState: ...

    def __len__(self) -> int: ...

    def method_for(self, method: str | Method | None = None) -> Method: ...


@dataclass(frozen=True, eq=False)
class LabelPredictions:
    """Labels of examples, and what the model predicts."""

    labels: Tensor  # (N,) class numbers
    predicted: Tensor  # (N,) class numbers
    classes: int  # that the model tells apart
    loss: Tensor  # (N,) −log p(label)
    margin: Tensor  # (N,) largest p of another class, minus p(label)
    token: Tensor  # (N,) the token that has the label; −1 where the whole example has it


@dataclass(frozen=True, eq=False)
class Suspects(LabelPredictions):
    """Training examples with their labels, the model's predictions, and how suspicious each label is."""

    scores: Tensor  # (N,), high: suspicious
    order: Tensor  # positions, the most suspicious first; without the examples that the index has skipped
    ranking: str

    def wrong(self, true: Any) -> Tensor:
        """(N,) bool: labels that differ from the true ones, which are class numbers too."""
        known = torch.as_tensor(true)
        if known.shape != self.labels.shape or known.is_floating_point():
            raise UndeError(
                f"true labels are {known.dtype} of shape {tuple(known.shape)}: expected a class number for each of "
                f"the {len(self.labels)} training examples"
            )
        return known.cpu() != self.labels

    def auc(self, true: Any) -> float:
        """The chance that a wrong label ranks above a right one, where the true labels (N,) are known."""
        return mislabel_auc(self.scores[self.order], self.wrong(true)[self.order])

    def rank(self) -> dict[int, int]:
        """Places by position: 1 for the most suspicious example."""
        return {i: place for place, i in enumerate(self.order.tolist(), 1)}


@dataclass(frozen=True, eq=False)
class Evidence:
    """Inputs of the rankings."""

    index: LabelledIndex
    predictions: LabelPredictions
    method: Method
    weights: WeightsLike
    top: int  # m
    usable: Tensor  # (N,) bool: examples that the index has not skipped
    progress: bool = False

    @cached_property
    def neighbours(self) -> Tensor:
        """(N, k) labels of similar training examples, the most similar first."""
        inputs, token = self.index._state.build_inputs("labels are compared"), self.predictions.token
        k = neighbour_count(int(self.usable.sum()))
        return nearest_labels(
            inputs.model, classifier(inputs.task), inputs.rows, token, k, progress=self.progress
        )

    @property
    def nearest(self) -> Tensor:
        """(N, 10) labels of the nearest training examples."""
        return self.neighbours[:, :NEAREST]

    def share(self) -> Tensor:
        """(N,) the share of the nearest examples that carry the label; one more is spread over all classes."""
        k, classes = self.nearest.shape[1], self.predictions.classes
        votes = (self.nearest == self.predictions.labels[:, None]).sum(1)
        return ((votes.double() + 1 / classes) / (k + 1)).masked_fill(self.predictions.labels < 0, 1.0)

    def quality(self) -> Tensor:
        """−log √(p · share): both say how likely the label is, the second without knowing it."""
        return (self.predictions.loss - self.share().log()) / 2

    def adjusted_loss(self) -> Tensor:
        """Loss over the root of its mean in the class. The root: a mean of few examples divides by less."""
        loss = self.predictions.loss.masked_fill(~self.usable, 0.0)
        classes, at = self.predictions.labels.unique(return_inverse=True)
        counts = torch.zeros(len(classes), dtype=loss.dtype).index_add(0, at, self.usable.to(loss.dtype))
        means = torch.zeros_like(counts).index_add(0, at, loss) / counts.clamp(min=1)
        return loss / means[at].clamp(min=torch.finfo(loss.dtype).tiny).sqrt()

    def self_influence(self, normalize_top: int | None = None) -> Tensor:
        scorer = self.index._state.scorer
        return scorer.self_influence(self.method, self.weights, normalize_top, torch.arange(len(self.index)))

    def opposition(self) -> Tensor:
        which, scorer = torch.arange(len(self.index)), self.index._state.scorer
        return -scorer.top_sums(self.method, self.weights, which, self.top, largest=False)


@dataclass(frozen=True)
class LabelRanking:
    """One way to rank labels."""

    scores: Callable[[Evidence], Tensor]  # gives (N,), high: suspicious
    words: str
    cost: Literal["model", "index", "pairs"]  # a pass of the model or the index; all pairs of examples


RANKINGS: dict[str, LabelRanking] = {
    "quality": LabelRanking(
        Evidence.quality,
        "label quality, how likely the model and the labels of the most similar examples find the label of an example",
        "model",
    ),
    "adjusted-loss": LabelRanking(
        Evidence.adjusted_loss,
        "adjusted loss, how unlikely the model finds the label of an example, beside others of its class",
        "model",
    ),
    "loss": LabelRanking(
        lambda at: at.predictions.loss, "loss, how unlikely the model finds the label of an example", "model"
    ),
    "margin": LabelRanking(
        lambda at: at.predictions.margin, "margin, how far another class is ahead of the label", "model"
    ),
    "self-influence": LabelRanking(
        Evidence.self_influence,
        "self-influence, how much the model had to bend for an example alone",
        "index",
    ),
    "normalised": LabelRanking(
        lambda at: at.self_influence(at.top),
        "normalised self-influence, the share of an example’s score that no other example explains",
        "pairs",
    ),
    "opposition": LabelRanking(
        Evidence.opposition,
        "opposition, how hard other training examples pull against an example",
        "pairs",
    ),
}
DEFAULT, BASELINE = "quality", "loss"


def label_rankings(
    index: LabelledIndex,
    weights: WeightsLike = None,
    names: Sequence[str] = (),
    *,
    top: int = TOP,
    method: str | Method | None = None,
    progress: bool = True,
) -> dict[str, Suspects]:
    """Rank the training examples of a classifier by how suspicious their labels are, in several ways.

    The index must have been opened with its model, task and training data.

    Args:
        index: The index of a classifier.
        weights: Weights of groups, for the rankings by influence.
        names: Rankings, of `RANKINGS`; all by default.
        top: m, the number of scores that "normalised" and "opposition" sum over.
        method: Another method than that of the index, for the rankings by influence.
        progress: Whether to show a progress bar.

    Returns:
        By name, all examples with the score of their label, the most suspicious first in `order`.

    Raises:
        UndeError: The task has no classes, the model or the data are missing, or a ranking is unknown.

    >>> label_rankings(index, names=["loss", "opposition"])["loss"].order[:10]  # doctest: +SKIP
    """
    for name in names:
        if name not in RANKINGS:
            raise unknown("ranking of labels", name, RANKINGS)
    evidence = label_evidence(index, weights, top=top, method=method, progress=progress)
    return {name: rank_labels(evidence, name) for name in names or RANKINGS}


def label_evidence(
    index: LabelledIndex,
    weights: WeightsLike = None,
    *,
    top: int = TOP,
    method: str | Method | None = None,
    progress: bool = True,
) -> Evidence:
    """Inputs of rankings, after one pass of the model; see `label_rankings`."""
    inputs = index._state.build_inputs("labels are compared with what the model predicts")
    task = classifier(inputs.task)
    index._state.runner.check_model()  # its predictions are shown beside stored gradients
    usable, chosen = ~index._state.stored.skipped, index.method_for(method)
    predictions = predict_labels(inputs.model, task, inputs.rows, progress=progress)
    return Evidence(index, predictions, chosen, weights, min(top, int(usable.sum())), usable, progress)


def rank_labels(evidence: Evidence, by: str = DEFAULT) -> Suspects:
    """One ranking of the labels."""
    scores = RANKINGS[by].scores(evidence).masked_fill(~evidence.usable, 0.0)
    order = scores.argsort(descending=True, stable=True)
    order = order[evidence.usable[order]]
    return Suspects(**vars(evidence.predictions), scores=scores, order=order, ranking=by)


def classifier(task: Task) -> Classification | TokenClassification:
    """The task of an index, where it has labels to doubt."""
    if isinstance(task, (Classification, TokenClassification)):
        return task
    raise UndeError(
        "wrong labels are looked for where there are labels, under unde.tasks.Classification or TokenClassification: "
        f"this is {type(task).__name__}. index.self_influence() ranks the examples of any task"
    )


def predict_labels(
    model: nn.Module, task: Classification | TokenClassification, rows: Rows, *, progress: bool = False
) -> LabelPredictions:
    """Predictions of a classifier; for token labels, those of the token whose label is least likely in each example."""
    device, _ = placement(model)
    parts, classes = [], 0
    bar = console.progress("predictions", len(rows), progress, unit="examples")
    with frozen_eval(model), torch.no_grad(), bar as advance:
        for start in range(0, len(rows), _PASS):
            batch = to_device(rows.batch(range(start, min(start + _PASS, len(rows)))), device)
            logits, target, token = (t.cpu() for t in _logits_and_labels(task, model, batch))
            parts.append((target.long(), logits.argmax(1), *_loss_and_margin(logits, target.long()), token))
            classes = logits.shape[1]
            advance(len(target))
    labels, predicted, loss, margin, token = map(torch.cat, zip(*parts))
    return LabelPredictions(labels, predicted, classes, loss, margin, token)


def _loss_and_margin(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) loss and (B,) margin of labels, in float64: in float32 the margins of a fitted model are all −1."""
    logs = logits.double().log_softmax(1)
    at = labels.clamp(min=0)[:, None]  # an ignored label counts as certain
    loss = -logs.gather(1, at)[:, 0]
    other = logs.scatter(1, at, -torch.inf).amax(1).exp()
    missing = labels < 0
    return loss.masked_fill(missing, 0.0), (other - (-loss).exp()).masked_fill(missing, -1.0)


def _logits_and_labels(
    task: Classification | TokenClassification, model: nn.Module, batch: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, classes) logits, (B,) labels and (B,) the tokens that have them."""
    if isinstance(task, Classification):
        with program_default():
            logits, labels = task.predict(model, batch)
        return logits, labels, torch.full_like(labels, -1)
    with program_default():
        logits, target, _ = task.predictions(model, batch)
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), target.flatten(), reduction="none", ignore_index=IGNORE
    )
    at = losses.view(target.shape).masked_fill(target == IGNORE, -1.0).argmax(1)
    rows = torch.arange(len(at), device=at.device)
    return logits[rows, at], target[rows, at], at


def influential_examples(
    index: LabelledIndex,
    where: Sequence[int],
    count: int = 5,
    weights: WeightsLike = None,
    method: str | Method | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Proponents and opponents of training examples: `count` positions each, the strongest first, without itself."""
    at, chosen = index._state, index.method_for(method)
    manifest, usable = at.stored.manifest, len(index) - int(at.stored.skipped.sum())
    if not len(where) or usable < 2:
        return [[] for _ in where], [[] for _ in where]
    count = min(count, usable - 1)
    along, against = list[list[int]](), list[list[int]]()
    step = max(
        1, at.stored.memory // (16 * manifest.width * manifest.terms)
    )  # features within the memory budget
    for start in range(0, len(where), step):
        some = list(where[start : start + step])
        scores = at.scorer.examples(chosen, torch.as_tensor(some))
        for side, largest in ((along, True), (against, False)):
            top: Top = scores.top(count + 1, weights, largest=largest)
            rows = zip(some, top.indices.tolist(), strict=True)
            side += [[n for n in row if n != i][:count] for i, row in rows]
    return along, against
