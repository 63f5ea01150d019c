"""Which labels look wrong: their quality, a cut-off, how many are expected to be wrong, suggestions and evidence.

The quality of a label y is √(p(y | x) · s(y)), with p of the model and s(c) the share of the nearest training
examples, in the hidden states, that carry c. The model knows the label and the neighbours do not, so a model that has
memorised its labels is not believed alone.

The number of wrong labels is estimated from the labels of the neighbours (`label_errors.py`); so many labels, those of
lowest quality, are flagged. They are at least as many as there are labels for which 8 of the 10 nearest examples carry
the same other label: a model that has memorised its labels makes the estimate too low. The expected precision is the
mean of P(wrong) over the flagged labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unde.data import Rows
from unde.errors import UndeError
from unde.index.label_errors import at_least, wrong_probability
from unde.index.labels import (
    Evidence,
    LabelledIndex,
    Suspects,
    influential_examples,
    label_evidence,
    rank_labels,
)
from unde.index.nearest import count_votes
from unde.methods import Method
from unde.scoring import WeightsLike
from unde.scoring.top import Table
from unde.tasks.tokens import IGNORE

INFLUENCES = 5  # proponents and opponents of a flagged label
_OPPOSED = 0.8  # of the nearest examples carry the same other label
_BLOCK = 4096  # examples whose votes are counted at once
_FILES = ("file", "file_name", "filename", "path", "image_path")  # columns that hold names of files


@dataclass(frozen=True, eq=False)
class LabelAudit:
    """The labels of all training examples, audited; `index.audit_labels()` gives it as a DataFrame.

    Attributes:
        suspects: Labels, predictions, and their order, the most suspicious first.
        quality: (N,) from 0 to 1, low for suspicious labels.
        flagged: (N,) bool.
        suggested: (N,) class numbers: of a flagged label the most common other one among the nearest examples, else
            the label itself.
        confidence: (N,) the share of the nearest examples that carry the suggested label.
        precision: The share of the flagged labels that are expected to be wrong; 0 where none is flagged.
        at_least: So many of the flagged labels are wrong, with 95 % confidence.
        proponents: Positions of the strongest proponents of each flagged example, by its position.
        opponents: The same of opponents.
    """

    evidence: Evidence
    suspects: Suspects
    quality: Tensor
    flagged: Tensor
    suggested: Tensor
    confidence: Tensor
    precision: float
    at_least: int
    proponents: Mapping[int, Sequence[int]]
    opponents: Mapping[int, Sequence[int]]

    @property
    def issues(self) -> list[int]:
        """Positions of the flagged labels, the most suspicious first."""
        return self.suspects.order[self.flagged[self.suspects.order]].tolist()

    @property
    def summary(self) -> str:
        """How many labels look wrong, in a sentence."""
        count, total = int(self.flagged.sum()), len(self.suspects.order)
        if not count:
            return f"None of {total:,} labels looks wrong."
        return (
            f"{count:,} of {total:,} labels look wrong; about {round(self.precision * count):,} of these are expected "
            f"to be ({self.precision:.0%}), at least {self.at_least:,}."
        )

    @property
    def estimate(self) -> str:
        """How the number and the precision are estimated."""
        k = self.evidence.neighbours.shape[1]
        return (
            f"Estimated from the labels of the {k} most similar training examples, as if labels were replaced at "
            "random. Right labels that are rare or ambiguous are flagged too. If the model has learned wrong labels by "
            "heart, more are wrong than expected. “At least” is a 95 % bound."
        )

    @cached_property
    def ids(self) -> Sequence[Any]:
        at = self.evidence.index._state
        return range(len(self.quality)) if at.ids is None else at.ids

    @cached_property
    def files(self) -> list[str] | None:
        """Names of the files of the training examples, where the data know them."""
        rows = self.evidence.index._state.rows
        return None if rows is None else file_names(rows)

    def table(self, classes: Sequence[str] | None = None, suspicious_first: bool = False) -> Table:
        """A row for each training example, in order or the most suspicious first.

        Args:
            classes: Names of the classes; numbers without them.
            suspicious_first: Flagged labels first, each part by quality.
        """
        s = self.suspects
        names: Sequence[Any] = range(s.classes) if classes is None else classes
        if len(names) != s.classes:
            raise UndeError(
                f"{len(names)} names of classes, the model tells {s.classes} apart: expected one each"
            )
        rows = s.order.tolist() if suspicious_first else range(len(self.quality))

        def named(numbers: Tensor) -> list[Any]:
            return [names[c] if c >= 0 else None for c in numbers[torch.tensor(rows)].tolist()]

        def evidence(side: Mapping[int, Sequence[int]]) -> list[list[Any]]:
            return [[self.ids[n] for n in side.get(i, ())] for i in rows]

        at = torch.tensor(rows)
        columns: dict[str, Any] = {"id": [self.ids[i] for i in rows]}
        if self.files is not None:
            columns["file"] = [self.files[i] for i in rows]
        if bool((s.token >= 0).any()):
            columns["token"] = s.token[at].tolist()
        columns |= {
            "is_label_issue": self.flagged[at].tolist(),
            "label_quality": self.quality[at].tolist(),
            "given_label": named(s.labels),
            "predicted_label": named(s.predicted),
            "suggested_label": named(self.suggested),
            "confidence": self.confidence[at].tolist(),
            "opponents": evidence(self.opponents),
            "proponents": evidence(self.proponents),
        }
        return Table({"index": list(rows), **columns} if suspicious_first else columns)


def audit(
    index: LabelledIndex,
    weights: WeightsLike = None,
    *,
    method: str | Method | None = None,
    count: int = INFLUENCES,
    progress: bool = True,
) -> LabelAudit:
    """Audit the labels of an index; see `Index.audit_labels`."""
    evidence = label_evidence(index, weights, method=method, progress=progress)
    suspects = rank_labels(evidence)
    labels, nearest, usable = suspects.labels, evidence.nearest, evidence.usable & (suspects.labels != IGNORE)
    wrong, low = torch.zeros(2, len(labels), dtype=torch.float64)
    wrong[usable], low[usable] = wrong_probability(
        evidence.neighbours[usable], labels[usable], suspects.classes
    )
    other, votes = _other_label(nearest, suspects)
    opposed = usable & (votes >= _OPPOSED * nearest.shape[1])
    expected = round(float(wrong.sum()))
    issues = suspects.order[usable[suspects.order]][: max(expected, int(opposed.sum()))].tolist()
    flagged = torch.zeros_like(usable)
    flagged[issues] = True
    agreeing = (nearest == labels[:, None]).sum(1)
    along, against = influential_examples(index, issues, count, weights, method)
    return LabelAudit(
        evidence,
        suspects,
        (-suspects.scores.double()).exp(),
        flagged,
        torch.where(flagged, other, labels),
        torch.where(flagged, votes, agreeing) / nearest.shape[1],
        float(wrong[flagged].mean()) if issues else 0.0,
        at_least(low[flagged]),
        dict(zip(issues, along)),
        dict(zip(issues, against)),
    )


def _other_label(nearest: Tensor, suspects: Suspects) -> tuple[Tensor, Tensor]:
    """The most common label (N,) of the nearest other than the given one, and how many of them carry it.

    Of equally common labels it is the one that the model predicts, else the first.
    """
    best, count = torch.empty_like(suspects.labels), torch.empty(len(nearest), dtype=torch.int64)
    for some in torch.arange(len(nearest)).split(_BLOCK):
        votes = count_votes(nearest[some], suspects.classes)
        given, predicted = suspects.labels[some].clamp(min=0)[:, None], suspects.predicted[some][:, None]
        order = (2 * votes).scatter_add(1, predicted, torch.ones_like(predicted)).scatter(1, given, -1)
        best[some] = order.argmax(1)
        count[some] = votes.gather(1, best[some][:, None])[:, 0]
    return best, count


def file_names(rows: Rows) -> list[str] | None:
    """Names of the files of examples: a column of names, or the `samples` of torchvision's folders; None without.

    >>> file_names(Rows({"file_name": ["a.png", "b.png"], "label": [0, 1]}))
    ['a.png', 'b.png']
    """
    data = rows.data
    samples = getattr(data, "samples", None)
    if isinstance(samples, list) and len(samples) == len(rows) and isinstance(samples[0], (tuple, list)):
        return [str(sample[0]) for sample in samples]
    columns: Any = data if isinstance(data, Mapping) else getattr(data, "column_names", None)
    if not isinstance(columns, (Mapping, list)):
        return None
    name = next((name for name in _FILES if name in columns), None)
    return None if name is None else [str(value) for value in data[name]]
