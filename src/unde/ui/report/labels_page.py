"""One page of training examples whose labels are suspicious, by what an index says about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from unde.errors import UndeError
from unde.index import Index
from unde.index.labels import BASELINE, DEFAULT, RANKINGS, Suspects, label_rankings, neighbours, wrong_labels
from unde.setup import Setup
from unde.tasks import TokenClassification
from unde.ui.report.example_view import ExampleView, class_name, class_names
from unde.ui.report.items import ScoredItem
from unde.ui.report.mislabel import LabelEvidence, MislabelPanel, RocCurve
from unde.ui.report.page import Page
from unde.ui.report.tables import Card, ResultTable
from unde.version import __version__
from unde.weights import Weights

SUSPECTS = 48  # on a page
NEIGHBOURS = 5  # on each side of a suspect
MANY = 50_000  # training examples that are not compared with each other in a moment
TOKENS = "Labels are those of the token of each text whose label the model finds least likely."


@dataclass(frozen=True)
class LabelReview:
    """The `count` most suspicious training examples of the ranking `by`, under the last of the `ways` to weigh scores.

    Where the setup knows the true labels, the panel shows how well each ranking and each way finds the wrong ones.
    `details` adds what the model and the neighbours say of each suspect.
    """

    index: Index
    setup: Setup
    ways: Mapping[str, Weights | None]  # by name
    by: str = DEFAULT
    count: int = SUSPECTS
    method: str | None = None
    details: bool = True

    @cached_property
    def rankings(self) -> dict[str, Suspects]:
        """The ranking `by` beside all others; of many examples, only beside those that do not compare all pairs."""
        pairs = len(self.index) <= MANY
        names = [name for name, r in RANKINGS.items() if name == self.by or pairs or r.cost != "pairs"]
        return label_rankings(self.index, self._weights, names, method=self.method)

    @property
    def suspects(self) -> Suspects:
        """The ranking `by`."""
        return self.rankings[self.by]

    @cached_property
    def view(self) -> ExampleView:
        return ExampleView(self.setup, class_names(self.setup, self.suspects.classes))

    def page(self, title: str) -> Page:
        """The panel as a page of its own."""
        suspects, panel = self.suspects, self.panel()
        differing = int((suspects.labels != suspects.predicted).sum())
        share = f"with {differing / len(suspects.labels):.1%} of the labels it was trained on"
        cards = [
            Card("Training examples", f"{len(suspects.labels):,}", f"{suspects.classes} classes"),
            Card("The model disagrees", f"{differing:,}", share),
        ]
        if panel.curves:
            cards.append(
                Card("AUC", f"{panel.curves[-1].auc:.3f}", "of finding the labels known to be wrong")
            )
        index = self.index
        provenance = {"unde": __version__, "index": str(index.folder), "ranking": self.by}
        return Page(
            title,
            f"{len(suspects.order):,} training examples, {self.method or index.method.name} scores",
            cards=cards,
            mislabelled=panel,
            provenance=provenance | index.method.describe(),
        )

    def panel(self) -> MislabelPanel:
        """The first of the ranking `by`, all rankings side by side, and curves where the true labels are known."""
        suspects, weighted = self.suspects, len(self.ways) > 1 and RANKINGS[self.by].cost != "model"
        wrong = self._wrong
        by_way = {list(self.ways)[-1] if weighted else self.by: suspects}
        note = TOKENS if isinstance(self.setup.task, TokenClassification) else ""
        if weighted and self._mixed:
            others = list(self.ways.items())[:-1]
            by_way = {
                way: wrong_labels(self.index, w, by=self.by, method=self.method) for way, w in others
            } | by_way
            note = self._unseen(by_way)
        return MislabelPanel(
            [ScoredItem(self.view.example(i), float(suspects.scores[i])) for i in self._first],
            [
                RocCurve.from_scores(name, ranking.scores[ranking.order], wrong[ranking.order])
                for name, ranking in {self._other: self.rankings[self._other], **by_way}.items()
            ]
            if self._mixed and wrong is not None
            else (),
            examples=len(suspects.order),
            mislabelled=None if wrong is None else int(wrong[suspects.order].sum()),
            ranked_by=(f"{list(self.ways)[-1]}: " if weighted else "") + RANKINGS[self.by].words,
            note=note,
            evidence=self._evidence() if self.details else (),
            rankings=self._table(),
        )

    @property
    def _weights(self) -> Weights | None:
        return list(self.ways.values())[-1]

    @property
    def _first(self) -> list[int]:
        return self.suspects.order[: max(self.count, 1)].tolist()

    @cached_property
    def _wrong(self) -> Tensor | None:
        """(N,) bool, where the true labels are known."""
        return None if self.view.true is None else self.suspects.wrong(self.view.true)

    @property
    def _mixed(self) -> bool:
        """Whether some labels are known to be wrong and some to be right."""
        return self._wrong is not None and len(self._wrong[self.suspects.order].unique()) == 2

    @property
    def _other(self) -> str:
        """The ranking to compare with: the baseline, or the cheapest by influence beside the baseline itself."""
        return BASELINE if self.by != BASELINE else "self-influence"

    def _table(self) -> ResultTable:
        """What each ranking finds; where the truth is not known, the overlap with the ranking shown."""
        count = len(self._first)
        columns, rows = [f"of its first {count} also shown here"], []
        if self._mixed:
            columns = ["AUC", f"wrong labels among the first {count}"]
        for name, ranking in self.rankings.items():
            first = ranking.order[:count]
            if self._mixed and self._wrong is not None:
                rows.append([name, f"{ranking.auc(self.view.true):.3f}", int(self._wrong[first].sum())])
            else:
                rows.append([name, len(set(self._first) & set(first.tolist()))])
        chosen = list(self.rankings).index(self.by)
        return ResultTable("Rankings side by side", ["ranking", *columns], rows, highlight=chosen)

    def _evidence(self) -> list[LabelEvidence]:
        suspects, first = self.suspects, self._first
        with_it, against = neighbours(self.index, first, NEIGHBOURS, self._weights, self.method)
        places, count = self.rankings[self._other].rank(), len(suspects.order)

        def names(numbers: Tensor) -> list[int | str]:
            return [class_name(number, self.view.classes) for number in numbers.tolist()]

        return [
            LabelEvidence(
                names(suspects.predicted[[i]])[0],
                names(suspects.labels[a]),
                names(suspects.labels[b]),
                {f"by {self._other}": f"{places[i]:,} of {count:,}"},
            )
            for i, a, b in zip(first, with_it, against, strict=True)
        ]

    def _unseen(self, rankings: Mapping[str, Suspects]) -> str:
        """The areas without the examples that self-retrieval looked at, labels and all."""
        seen = set() if self._weights is None else set(self._weights.query_digests)
        free = torch.tensor([digest not in seen for digest in self.view.train.digests()])
        if bool(free.all()):
            return ""
        try:
            areas = [
                f"{replace(ranking, order=ranking.order[free[ranking.order]]).auc(self.view.true):.3f} {name}"
                for name, ranking in rankings.items()
            ]
        except UndeError:  # all of the others are right, or all wrong
            return ""
        return (
            f"Weights saw {int((~free).sum()):,} of these examples with their labels; among the other "
            f"{int(free.sum()):,} the area under the curve is {' and '.join(areas)}."
        )
