"""Mislabelled examples: the most suspicious ones, and how well the ranking finds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unde.console import counted
from unde.data import to_numpy
from unde.errors import UndeError
from unde.evaluate import mislabel_auc
from unde.markup import Child, Html, el, mark, number
from unde.ui.report.items import ScoredItem, example, kind_of, label_text, largest_score, same
from unde.ui.report.svg import Line, curve_key, line_plot
from unde.ui.report.tables import ResultTable, lead, legend, note, result_table, section, terms

EVIDENCE = (
    "Beside each one: its label, the label that most of the similar training examples carry (and how many of them), "
    "what the model predicts, and the labels of the examples that influence it most. Proponents pull the model the "
    "same way, opponents the other way: where a label is wrong, opponents often carry the right one."
)
HIT = mark("hit", "✓", "found", "the label is indeed wrong")
MISS = mark("miss", "–", "label is right", "the label is not known to be wrong")


@dataclass(frozen=True, eq=False)
class RocCurve:
    """A named ROC curve by its points, from (0, 0) to (1, 1), with the area under it.

    >>> curve = RocCurve.from_scores("weighted", [0.9, 0.8, 0.2, 0.1], [True, False, True, False])
    >>> curve.auc
    0.75
    """

    name: str
    false_positive_rate: Sequence[float] | np.ndarray
    true_positive_rate: Sequence[float] | np.ndarray
    auc: float

    def __post_init__(self) -> None:
        for name in ("false_positive_rate", "true_positive_rate"):
            rates = to_numpy(getattr(self, name)).astype(np.float64)
            object.__setattr__(self, name, rates)
            if rates.ndim != 1 or not ((rates >= 0) & (rates <= 1)).all():
                raise UndeError(f"the ROC curve {self.name!r}: expected rates in [0, 1] as one list ({name})")

    @classmethod
    def from_scores(cls, name: str, scores: object, is_mislabelled: object) -> RocCurve:
        """The curve of a ranking: the highest score is suspected first, equal scores all at once."""
        values = to_numpy(scores).astype(np.float64)
        wrong = to_numpy(is_mislabelled).astype(bool)
        if values.ndim != 1 or values.shape != wrong.shape:
            raise UndeError(f"scores {values.shape} and flags {wrong.shape}: expected (N,) and (N,)")
        if not np.isfinite(values).all():
            raise UndeError(f"the scores of {name!r} hold NaN or infinite values")
        if not wrong.any() or wrong.all():
            raise UndeError(
                f"a ROC curve needs right and wrong labels, got {int(wrong.sum())} wrong of {len(wrong)}"
            )
        order = np.argsort(-values, kind="stable")
        last_of_ties = np.append(np.diff(values[order]) != 0, True)
        hits = np.append(0, np.cumsum(wrong[order])[last_of_ties])
        misses = np.append(0, np.cumsum(~wrong[order])[last_of_ties])
        corner = np.ones(len(hits), dtype=bool)  # points on a straight stretch can go
        corner[1:-1] = np.diff(hits)[:-1] * np.diff(misses)[1:] != np.diff(hits)[1:] * np.diff(misses)[:-1]
        return cls(name, misses[corner] / misses[-1], hits[corner] / hits[-1], mislabel_auc(values, wrong))


@dataclass(frozen=True)
class LabelEvidence:
    """Evidence on a label: the prediction of the model, a suggestion, and the labels of influential training examples.

    >>> LabelEvidence("dog", ["cat", "cat", "fox"], ["dog", "dog", "dog"]).along
    'cat\xa0×2, fox'
    """

    predicted: int | str
    proponents: Sequence[
        int | str
    ] = ()  # labels of examples that pull the model the same way, the strongest first
    opponents: Sequence[int | str] = ()  # labels of examples that pull against it
    suggested: int | str | None = None
    confidence: float | None = None  # the share of the nearest examples that carry the suggested label

    @property
    def along(self) -> str:
        return _tally(self.proponents)

    @property
    def against(self) -> str:
        return _tally(self.opponents)


def _tally(labels: Sequence[int | str]) -> str:
    """Labels with their counts, the commonest first."""
    counts = Counter(map(label_text, labels)).most_common()
    return ", ".join(label if n == 1 else f"{label}\u00a0×{n}" for label, n in counts)


@dataclass(frozen=True, eq=False)
class MislabelPanel:
    """The most suspicious training examples, most suspicious first, and the curves of the ranking.

    `mislabelled` is the number of `examples` with a label known to be wrong; None where the truth is not known, and
    then suspects have no verdict. An example is a hit if its item is mislabelled. `evidence` has the prediction and the
    influential examples of each suspect, `rankings` compares this ranking with others, `next_steps` say what to do.

    >>> from unde.ui.report import Item
    >>> panel = MislabelPanel([ScoredItem(Item(4, label=3, true_label=8), 5.1)], examples=100, mislabelled=10)
    >>> panel.hits
    1
    """

    suspects: Sequence[ScoredItem]
    curves: Sequence[RocCurve] = ()
    examples: int | None = None
    mislabelled: int | None = None
    ranked_by: str = "self-influence"
    note: str = ""
    evidence: Sequence[LabelEvidence] = ()
    rankings: ResultTable | None = None
    next_steps: Sequence[str] = ()

    def __post_init__(self) -> None:
        if len(self.evidence) not in (0, len(self.suspects)):
            raise UndeError(
                f"{len(self.evidence)} answers for {len(self.suspects)} suspects: expected one for each"
            )

    @property
    def hits(self) -> int:
        """The number of suspects with a label that is known to be wrong."""
        return sum(scored.item.is_mislabelled for scored in self.suspects)


def mislabel_section(panel: MislabelPanel) -> Html:
    """The section with the curves and the wall of suspects."""
    wall = _wall(panel)
    return section(
        "mislabelled",
        "Suspected labels" if panel.mislabelled is None else "Mislabelled examples",
        lead(_in_words(panel)),
        note(panel.note),
        lead(EVIDENCE) if panel.evidence else None,
        el("div.detect", _curves(panel.curves), wall) if panel.curves else wall,
        result_table(panel.rankings) if panel.rankings is not None else None,
        [el("h3", "What to do next"), el("ol.todo", [el("li", step) for step in panel.next_steps])]
        if panel.next_steps
        else None,
    )


def _in_words(panel: MislabelPanel) -> str:
    text = f"Training examples ranked by {panel.ranked_by}, the most suspicious first."
    if panel.mislabelled is None:
        return text + " Which labels are wrong is not known here: look at them."
    if panel.examples:
        share = panel.mislabelled / panel.examples
        text += (
            f" {panel.mislabelled:,} of {counted(panel.examples, 'label')} are wrong ({share:.1%}); "
            f"of the first {len(panel.suspects)}, {panel.hits} are, where chance would give "
            f"{number(share * len(panel.suspects), 2)}."
        )
    else:
        text += f" {panel.hits} of the first {len(panel.suspects)} labels are wrong."
    return text


def _curves(curves: Sequence[RocCurve]) -> Html:
    lines = [Line(curve.name, curve.false_positive_rate, curve.true_positive_rate) for curve in curves]
    in_words = ", ".join(f"{curve.name} {curve.auc:.3f}" for curve in curves)
    return el(
        "figure.roc",
        line_plot(
            lines,
            title=f"ROC curves; area under the curve: {in_words}",
            x_label="false-positive rate",
            y_label="true-positive rate",
            x_range=(0.0, 1.0),
            y_range=(0.0, 1.0),
            diagonal=True,
            size=(370, 370),
        ),
        el(
            "figcaption",
            curve_key([(curve.name, f"{curve.auc:.3f}") for curve in curves]),
            "Area under the ROC curve (AUC): the chance that a wrong label ranks above a right one. "
            "0.5 is guessing, the dotted diagonal; 1 is perfect.",
        ),
    )


def _wall(panel: MislabelPanel) -> Html | None:
    if not len(panel.suspects):
        return None
    known = panel.mislabelled is not None
    kind = kind_of(scored.item for scored in panel.suspects)
    largest = largest_score(panel.suspects)
    tiles = []
    for position, scored in enumerate(panel.suspects):
        hit = scored.item.is_mislabelled
        marks = [HIT if hit else MISS] if known else []
        state = ("hit" if hit else "miss") if known else ""
        facts = _facts(scored, panel.evidence[position]) if panel.evidence else None
        tiles.append(example(scored, kind, largest, marks, state, facts))
    meanings = [HIT, "wrong label found; given → true"], [MISS, "false alarm: nothing wrong is known of it"]
    cards = ".cards-of" if panel.evidence else ""
    wall = el(f"ol.examples.wall{cards}.as-{kind}", tiles)
    return el("div", legend(meanings) if known else None, wall)


def _facts(scored: ScoredItem, evidence: LabelEvidence) -> Html:
    """The labels in question, one below the other."""
    item, suggested = scored.item, evidence.suggested
    rows: dict[str, Child] = {"given": None if item.label is None else label_text(item.label)}
    if item.true_label is not None and item.is_mislabelled:
        rows["really"] = label_text(item.true_label)
    if suggested is not None:
        share = "" if evidence.confidence is None else f" ({evidence.confidence:.0%})"
        rows["suggested"] = el("span.other", label_text(suggested) + share)
    if suggested is None or not same(suggested, evidence.predicted):
        rows["predicted"] = label_text(evidence.predicted)
    rows |= {"opponents": evidence.against, "proponents": evidence.along, "quality": number(scored.score, 2)}
    return terms("facts.said", [(term, value) for term, value in rows.items() if value])
