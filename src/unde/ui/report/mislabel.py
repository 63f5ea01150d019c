"""Mislabelled examples: the most suspicious ones as a wall, and how well the ranking finds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from unde.console import counted
from unde.data import to_numpy
from unde.errors import UndeError
from unde.evaluate import mislabel_auc
from unde.markup import Html, el, mark, number
from unde.ui.report.items import ScoredItem, example, kind_of, label_text, largest_score, same
from unde.ui.report.svg import Line, line_key, roc_plot
from unde.ui.report.tables import ResultTable, result_table

NEIGHBOURS = (
    "Beside each one: the label it carries, what the model says, and the labels of the training examples nearest to "
    "it. Proponents pull the model the same way, opponents the other way: where a label is wrong, opponents often "
    "carry the right one. A rare or hard example is suspicious too, so look before you change a label."
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
    """What others say of an example: the model, and the training examples nearest to it, by the labels they carry.

    >>> LabelEvidence("dog", ["cat", "cat", "fox"], ["dog", "dog", "dog"]).along
    'cat\\xa0×2, fox'
    """

    predicted: int | str
    proponents: Sequence[int | str] = ()  # that pull the model the same way, the strongest first
    opponents: Sequence[int | str] = ()  # that pull against it
    places: Mapping[str, str] = field(default_factory=dict)  # in other rankings

    @property
    def along(self) -> str:
        return _tally(self.proponents)

    @property
    def against(self) -> str:
        return _tally(self.opponents)


def _tally(labels: Sequence[int | str]) -> str:
    """Labels with how often each is there, the commonest first."""
    counted = Counter(map(label_text, labels)).most_common()
    return ", ".join(label if n == 1 else f"{label}\u00a0×{n}" for label, n in counted)


@dataclass(frozen=True, eq=False)
class MislabelPanel:
    """The most suspicious training examples, most suspicious first, and the curves of the ranking.

    `mislabelled` is how many of the `examples` are known to be wrong; leave it None where the truth is not
    known, and the wall shows suspects without a verdict. An example is a hit if its item is mislabelled. `said` is what
    the model and its neighbours say of each of those found, `rankings` compares this ranking with others.

    >>> from unde.ui.report import Item
    >>> panel = MislabelPanel([ScoredItem(Item(4, label=3, true_label=8), 5.1)], examples=100, mislabelled=10)
    >>> panel.hits
    1
    """

    found: Sequence[ScoredItem]
    curves: Sequence[RocCurve] = ()
    examples: int | None = None
    mislabelled: int | None = None
    ranked_by: str = "self-influence"
    note: str = ""
    said: Sequence[LabelEvidence] = ()
    rankings: ResultTable | None = None

    def __post_init__(self) -> None:
        if len(self.said) not in (0, len(self.found)):
            raise UndeError(f"{len(self.said)} answers for {len(self.found)} suspects: expected one for each")

    @property
    def hits(self) -> int:
        """How many of the examples shown have a label that is known to be wrong."""
        return sum(scored.item.is_mislabelled for scored in self.found)


def mislabel_section(panel: MislabelPanel) -> Html:
    """The section with the areas, the curves and the wall of suspects."""
    known = panel.mislabelled is not None
    return el(
        "section",
        {"id": "mislabelled", "aria-labelledby": "mislabelled-title"},
        el("h2", {"id": "mislabelled-title"}, "Mislabelled examples" if known else "Suspected labels"),
        el("p", {"class": "lead"}, _in_words(panel)),
        el("p", {"class": "note"}, panel.note) if panel.note else None,
        result_table(panel.rankings) if panel.rankings is not None else None,
        el("p", {"class": "lead"}, NEIGHBOURS) if panel.said else None,
        el("div", {"class": "detect"}, _curves(panel.curves), _wall(panel, known))
        if panel.curves
        else _wall(panel, known),
    )


def _in_words(panel: MislabelPanel) -> str:
    text = f"Training examples ranked by {panel.ranked_by}, the most suspicious first."
    if panel.mislabelled is None:
        return text + " Which labels are wrong is not known here: look at them."
    if panel.examples:
        share = panel.mislabelled / panel.examples
        text += (
            f" {panel.mislabelled:,} of {counted(panel.examples, 'label')} are wrong ({share:.1%}); "
            f"of the first {len(panel.found)}, {panel.hits} are, where chance would give "
            f"{number(share * len(panel.found), 2)}."
        )
    else:
        text += f" {panel.hits} of the first {len(panel.found)} labels are wrong."
    return text


def _curves(curves: Sequence[RocCurve]) -> Html:
    lines = [Line(curve.name, curve.false_positive_rate, curve.true_positive_rate) for curve in curves]
    in_words = ", ".join(f"{curve.name} {curve.auc:.3f}" for curve in curves)
    keys = [
        el(
            "div",
            None,
            el("dt", None, line_key(index) if len(curves) > 1 else None, curve.name),
            el("dd", None, f"{curve.auc:.3f}"),
        )
        for index, curve in enumerate(curves)
    ]
    return el(
        "figure",
        {"class": "roc"},
        roc_plot(lines, title=f"ROC curves; area under the curve: {in_words}"),
        el(
            "figcaption",
            None,
            el("dl", {"class": "areas"}, keys),
            "Area under the ROC curve (AUC): the chance that a wrong label ranks above a right one. "
            "0.5 is guessing, the dotted diagonal; 1 is perfect.",
        ),
    )


def _wall(panel: MislabelPanel, known: bool) -> Html | None:
    if not len(panel.found):
        return None
    kind = kind_of(scored.item for scored in panel.found)
    largest = largest_score(panel.found)
    tiles = []
    for position, scored in enumerate(panel.found):
        hit = scored.item.is_mislabelled
        marks = [HIT if hit else MISS] if known else []
        state = ("hit" if hit else "miss") if known else ""
        facts = _said(scored, panel.said[position]) if panel.said else None
        tiles.append(example(scored, kind, largest, marks, state, facts))
    legend = el(
        "ul",
        {"class": "legend", "aria-label": "marks"},
        el("li", None, HIT, "wrong label found; given → true"),
        el("li", None, MISS, "false alarm: nothing wrong is known of it"),
    )
    cards = " cards-of" if panel.said else ""
    return el(
        "div", None, legend if known else None, el("ol", {"class": f"examples wall{cards} as-{kind}"}, tiles)
    )


def _said(scored: ScoredItem, said: LabelEvidence) -> Html:
    """The labels in question, one below the other."""
    item = scored.item
    agrees = item.label is not None and same(item.label, said.predicted)
    rows = [
        ("given", None if item.label is None else label_text(item.label), ""),
        ("predicted", label_text(said.predicted), "" if agrees else "other"),
        ("proponents", said.along, ""),
        ("opponents", said.against, ""),
        *((ranking, place, "") for ranking, place in said.places.items()),
    ]
    if item.true_label is not None and item.is_mislabelled:
        rows.insert(1, ("really", label_text(item.true_label), ""))
    return el(
        "dl",
        {"class": "facts said"},
        [
            el("div", {"class": kind or None}, el("dt", None, term), el("dd", {"dir": "auto"}, value))
            for term, value, kind in rows
            if value
        ],
    )
