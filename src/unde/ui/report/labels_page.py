"""One page of training examples whose labels look wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from unde.index import Index
from unde.index.audit import LabelAudit, audit
from unde.index.labels import BASELINE, DEFAULT, RANKINGS, Suspects, rank_labels
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
COMPARED = (DEFAULT, "adjusted-loss", BASELINE, "margin", "self-influence")  # rankings, none of all pairs
TOKENS = "Labels are those of the token of each text whose label the model finds least likely."
NEXT_STEPS = (
    "Look at each one: is the suggested label right?",
    "Mend the labels in the training data, or leave out what nobody can decide. The file of --csv or --parquet has all "
    "examples with their suggestions.",
    "Train again on the mended data, build the index again, and audit it once more: a model that was not taught wrong "
    "labels finds those that are left more easily.",
)


@dataclass(frozen=True)
class LabelReview:
    """The audit of the labels of an index, as a page; `details` adds what the model and other examples say of each.

    The flagged labels are shown, up to `count`; where the true labels are known those of the next lowest quality too,
    so that the ranking can be judged.
    """

    index: Index
    setup: Setup
    weights: Weights | None = None
    count: int = SUSPECTS
    method: str | None = None
    details: bool = True

    @cached_property
    def audit(self) -> LabelAudit:
        return audit(self.index, self.weights, method=self.method)

    @property
    def suspects(self) -> Suspects:
        return self.audit.suspects

    @cached_property
    def view(self) -> ExampleView:
        return ExampleView(self.setup, class_names(self.setup, self.suspects.classes))

    @cached_property
    def rankings(self) -> dict[str, Suspects]:
        """The ranking by quality beside others."""
        return {
            name: self.suspects if name == DEFAULT else rank_labels(self.audit.evidence, name)
            for name in COMPARED
        }

    def page(self, title: str) -> Page:
        """The panel as a page of its own."""
        suspects, panel, flagged = self.suspects, self.panel(), len(self.audit.issues)
        cards = [
            Card("Training examples", f"{len(suspects.labels):,}", f"{suspects.classes} classes"),
            Card("Labels that look wrong", f"{flagged:,}", f"{flagged / len(suspects.labels):.1%} of all"),
            Card(
                "Expected precision",
                f"{self.audit.precision:.0%}" if flagged else "–",
                f"at least {self.audit.at_least:,} of them: see below",
            ),
        ]
        if panel.curves:
            cards.append(
                Card("AUC", f"{panel.curves[-1].auc:.3f}", "of finding the labels known to be wrong")
            )
        index = self.index
        provenance = {"unde": __version__, "index": str(index.folder), "ranking": DEFAULT}
        return Page(
            title,
            f"{len(suspects.order):,} training examples, {self.method or index.method.name} scores",
            cards=cards,
            mislabelled=panel,
            provenance=provenance | index.method.describe(),
        )

    def panel(self) -> MislabelPanel:
        """The labels of lowest quality, rankings side by side, and curves where the true labels are known."""
        suspects, wrong, quality = self.suspects, self._wrong, self.audit.quality
        curves = []
        if self._mixed and wrong is not None:
            order = suspects.order
            curves = [
                RocCurve.from_scores(name, self.rankings[name].scores[order], wrong[order])
                for name in (BASELINE, DEFAULT)
            ]
        parts = [self.audit.summary, self.audit.estimate]
        if isinstance(self.setup.task, TokenClassification):
            parts.append(TOKENS)
        return MislabelPanel(
            [ScoredItem(self.view.example(i), float(quality[i])) for i in self._first],
            curves,
            examples=len(suspects.order),
            mislabelled=None if wrong is None else int(wrong[suspects.order].sum()),
            ranked_by=RANKINGS[DEFAULT].words,
            note=" ".join(parts),
            evidence=self._label_evidence() if self.details else (),
            rankings=self._table(),
            next_steps=NEXT_STEPS if self.details else (),
        )

    @property
    def _first(self) -> list[int]:
        shown = self.suspects.order[: max(self.count, 1)].tolist()
        flagged = [i for i in shown if self.audit.flagged[i]]
        return shown if self._wrong is not None or not flagged else flagged

    @cached_property
    def _wrong(self) -> Tensor | None:
        """(N,) bool, where the true labels are known."""
        return None if self.view.true is None else self.suspects.wrong(self.view.true)

    @property
    def _mixed(self) -> bool:
        """Whether some labels are known to be wrong and some to be right."""
        return self._wrong is not None and len(self._wrong[self.suspects.order].unique()) == 2

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
        return ResultTable("Rankings side by side", ["ranking", *columns], rows, highlight=0)

    def _label_evidence(self) -> list[LabelEvidence]:
        """The prediction, the suggestion and the labels of proponents and opponents of each suspect."""
        a = self.audit

        def name(number: Tensor) -> int | str:
            return class_name(number, self.view.classes)

        def labels(positions: Sequence[int]) -> list[int | str]:
            return [name(a.suspects.labels[n]) for n in positions]

        return [
            LabelEvidence(
                name(a.suspects.predicted[i]),
                labels(a.proponents.get(i, ())),
                labels(a.opponents.get(i, ())),
                suggested=name(a.suggested[i]) if a.flagged[i] else None,
                confidence=float(a.confidence[i]),
            )
            for i in self._first
        ]
