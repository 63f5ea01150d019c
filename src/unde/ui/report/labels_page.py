"""One page of training examples whose labels are suspicious, by what an index says about them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unde.data import Rows
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

Ways = Mapping[str, Weights | None]  # of scoring, by name
SUSPECTS = 48  # on a page
NEIGHBOURS = 5  # on each side of a suspect
MANY = 50_000  # training examples that are not compared with each other in a moment
TOKENS = "Labels are those of the token of each text whose label the model finds least likely."


def label_page(
    index: Index,
    setup: Setup,
    ways: Ways,
    *,
    title: str,
    by: str = DEFAULT,
    count: int = SUSPECTS,
    method: str | None = None,
) -> tuple[Page, dict[str, Suspects]]:
    """The `count` most suspicious training examples under the last way of scoring, and all rankings, `by` among them.

    Where the setup knows the true labels, the page shows how well each ranking finds the wrong ones.
    """
    rankings = side_by_side(index, list(ways.values())[-1], by=by, method=method)
    suspects = rankings[by]
    view = ExampleView(setup, class_names(setup, suspects.classes))
    panel = label_panel(index, view, rankings, ways, by=by, count=count, method=method)
    differing = int((suspects.labels != suspects.predicted).sum())
    cards = [
        Card("Training examples", f"{len(suspects.labels):,}", f"{suspects.classes} classes"),
        Card(
            "The model disagrees",
            f"{differing:,}",
            f"with {differing / len(suspects.labels):.1%} of the labels it was trained on",
        ),
    ]
    if panel.curves:
        cards.append(Card("AUC", f"{panel.curves[-1].auc:.3f}", "of finding the labels known to be wrong"))
    page = Page(
        title,
        f"{len(suspects.order):,} training examples, {index.method.name if method is None else method} scores",
        cards=cards,
        mislabelled=panel,
        provenance={
            "unde": __version__,
            "index": str(index.folder),
            "ranking": by,
            **index.method.describe(),
        },
    )
    return page, rankings


def side_by_side(
    index: Index,
    weights: Weights | None,
    *,
    by: str = DEFAULT,
    method: str | None = None,
    progress: bool = True,
) -> dict[str, Suspects]:
    """The ranking `by` beside all others; of many examples, only beside those that do not compare all pairs."""
    pairs = len(index) <= MANY
    names = [name for name, ranking in RANKINGS.items() if name == by or pairs or ranking.cost != "pairs"]
    return label_rankings(index, weights, names, method=method, progress=progress)


def label_panel(
    index: Index,
    view: ExampleView,
    rankings: Mapping[str, Suspects],
    ways: Ways,
    *,
    by: str = DEFAULT,
    count: int = SUSPECTS,
    method: str | None = None,
    details: bool = True,
) -> MislabelPanel:
    """The first of the ranking `by`, all rankings side by side, and curves where the true labels are known.

    `rankings` are those under the last of the `ways`. `details` adds what the model and the neighbours say of each.
    """
    suspects, (name, weights) = rankings[by], list(ways.items())[-1]
    first = suspects.order[: max(count, 1)].tolist()
    wrong = None if view.true is None else suspects.wrong(view.true)
    both = wrong is not None and bool(wrong[suspects.order].any()) and not bool(wrong[suspects.order].all())
    of_tokens = TOKENS if isinstance(view.setup.task, TokenClassification) else ""
    weighted = len(ways) > 1 and RANKINGS[by].cost != "model"
    each = {by: suspects}
    if weighted:
        others = list(ways.items())[:-1] if both else []
        each = {way: wrong_labels(index, w, by=by, method=method, progress=False) for way, w in others}
        each[name] = suspects
    other = _other(by)
    return MislabelPanel(
        [ScoredItem(view.example(i), float(suspects.scores[i])) for i in first],
        _curves({other: rankings[other], **each}, wrong) if both and wrong is not None else (),
        examples=len(suspects.order),
        mislabelled=None if wrong is None else int(wrong[suspects.order].sum()),
        ranked_by=(f"{name}: " if weighted else "") + RANKINGS[by].words,
        note=_unseen(view.train, weights, each, wrong)
        if weighted and both and wrong is not None
        else of_tokens,
        evidence=_evidence(index, view, rankings, by, first, weights, method) if details else (),
        rankings=_table(rankings, by, len(first), wrong if both else None),
    )


def _other(by: str) -> str:
    """The ranking to compare with: the baseline, or the cheapest by influence beside the baseline itself."""
    return BASELINE if by != BASELINE else "self-influence"


def _table(rankings: Mapping[str, Suspects], by: str, count: int, wrong: Tensor | None) -> ResultTable:
    """What each ranking finds; where the truth is not known, the overlap with the ranking shown."""
    chosen = set(rankings[by].order[:count].tolist())
    rows = []
    for name, found in rankings.items():
        first = found.order[:count]
        if wrong is None:
            rows.append([name, len(chosen & set(first.tolist()))])
        else:
            area = RocCurve.from_scores(name, found.scores[found.order], wrong[found.order]).auc
            rows.append([name, f"{area:.3f}", int(wrong[first].sum())])
    columns = (
        [f"of its first {count} also shown here"]
        if wrong is None
        else ["AUC", f"wrong labels among the first {count}"]
    )
    return ResultTable(
        "Rankings side by side", ["ranking", *columns], rows, highlight=list(rankings).index(by)
    )


def _curves(rankings: Mapping[str, Suspects], wrong: Tensor) -> list[RocCurve]:
    return [
        RocCurve.from_scores(name, found.scores[found.order], wrong[found.order])
        for name, found in rankings.items()
    ]


def _evidence(
    index: Index,
    view: ExampleView,
    rankings: Mapping[str, Suspects],
    by: str,
    first: list[int],
    weights: Weights | None,
    method: str | None,
) -> list[LabelEvidence]:
    with_it, against = neighbours(index, first, NEIGHBOURS, weights, method)
    suspects, other = rankings[by], _other(by)
    places, count = rankings[other].rank(), len(suspects.order)

    def labels(positions: list[int]) -> list[int | str]:
        return [class_name(int(suspects.labels[n]), view.classes) for n in positions]

    return [
        LabelEvidence(
            class_name(int(suspects.predicted[i]), view.classes),
            labels(a),
            labels(b),
            {f"by {other}": f"{places[i]:,} of {count:,}"},
        )
        for i, a, b in zip(first, with_it, against, strict=True)
    ]


def _unseen(train: Rows, weights: Weights | None, rankings: Mapping[str, Suspects], wrong: Tensor) -> str:
    """The areas without the examples that self-retrieval looked at, labels and all."""
    if weights is None:
        return ""
    seen = set(weights.query_digests)
    free = torch.tensor([digest not in seen for digest in train.digests()])
    if bool(free.all()):
        return ""
    try:
        areas = []
        for name, found in rankings.items():
            rest = found.order[free[found.order]]
            areas.append(f"{RocCurve.from_scores(name, found.scores[rest], wrong[rest]).auc:.3f} {name}")
    except UndeError:  # all of the others are right, or all wrong
        return ""
    return (
        f"Weights saw {int((~free).sum()):,} of these examples with their labels; among the other "
        f"{int(free.sum()):,} the area under the curve is {' and '.join(areas)}."
    )
