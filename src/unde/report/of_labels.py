"""One page of training examples whose labels are suspicious, by what an index says about them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unde.data import Rows
from unde.errors import UndeError
from unde.index import Index
from unde.index.labels import Suspects, neighbours, wrong_labels
from unde.recipe import Setup
from unde.report.classes import class_names, named
from unde.report.items import Scored
from unde.report.mislabel import MislabelPanel, RocCurve, Said
from unde.report.page import Page
from unde.report.shown import Shown
from unde.report.tables import Card
from unde.tasks import TokenClassification
from unde.version import __version__
from unde.weights import Weights

Ways = Mapping[str, Weights | None]  # of scoring, by name
SUSPECTS = 48  # on a page
NEIGHBOURS = 5  # on each side of a suspect
TOKENS = "Labels are those of the token of each text whose label the model finds least likely."
WORDS = {
    "normalised": "normalised self-influence, the share of an example’s score that no other example explains",
    "self-influence": "self-influence, how much the model had to bend for an example alone",
    "opposition": "opposition, how hard other training examples pull against an example",
}


def label_page(
    index: Index,
    setup: Setup,
    ways: Ways,
    *,
    title: str,
    by: str = "normalised",
    count: int = SUSPECTS,
    method: str | None = None,
) -> tuple[Page, Suspects]:
    """The `count` most suspicious training examples under the last way of scoring, and the ranking of all of them.

    Where the setup knows the true labels, the page shows how well each way finds the wrong ones.
    """
    rankings = {name: wrong_labels(index, w, by=by, method=method) for name, w in ways.items()}
    last = list(rankings.values())[-1]
    classes = class_names(setup, last.classes)
    shown = Shown(setup, classes)
    panel = label_panel(index, shown, rankings, ways, count=count, method=method)
    differing = int((last.given != last.predicted).sum())
    cards = [
        Card("Training examples", f"{len(last.given):,}", f"{last.classes} classes"),
        Card(
            "The model disagrees",
            f"{differing:,}",
            f"with {differing / len(last.given):.1%} of the labels it was trained on",
        ),
    ]
    if panel.curves:
        cards.append(Card("AUC", f"{panel.curves[-1].auc:.3f}", "of finding the labels known to be wrong"))
    page = Page(
        title,
        f"{len(last.order):,} training examples, {index.method.name if method is None else method} scores",
        cards=cards,
        mislabelled=panel,
        provenance={
            "unde": __version__,
            "index": str(index.folder),
            "ranking": by,
            **index.method.describe(),
        },
    )
    return page, last


def label_panel(
    index: Index,
    shown: Shown,
    rankings: Mapping[str, Suspects],
    ways: Ways,
    *,
    count: int = SUSPECTS,
    method: str | None = None,
    beside: bool = True,
) -> MislabelPanel:
    """The first of the last ranking, with what the model and their neighbours say (`beside`), and curves of all
    rankings where the true labels are known."""
    name, last = list(rankings.items())[-1]
    first = last.order[: max(count, 1)].tolist()
    wrong = None if shown.true is None else last.wrong(shown.true)
    told = wrong is not None and bool(wrong[last.order].any()) and not bool(wrong[last.order].all())
    of_tokens = TOKENS if isinstance(shown.setup.task, TokenClassification) else ""
    weighing = f"{name}: " if len(rankings) > 1 else ""
    return MislabelPanel(
        [Scored(shown.example(i), float(last.scores[i])) for i in first],
        _curves(rankings, wrong) if told and wrong is not None else (),
        examples=len(last.order),
        mislabelled=None if wrong is None else int(wrong[last.order].sum()),
        ranked_by=weighing + WORDS[last.ranking],
        note=_unseen(shown.train, ways[name], rankings, wrong) if told and wrong is not None else of_tokens,
        said=_said(index, shown, last, first, ways[name], method) if beside else (),
    )


def _curves(rankings: Mapping[str, Suspects], wrong: Tensor) -> list[RocCurve]:
    return [
        RocCurve.from_scores(name, found.scores[found.order], wrong[found.order])
        for name, found in rankings.items()
    ]


def _said(
    index: Index,
    shown: Shown,
    suspects: Suspects,
    first: list[int],
    weights: Weights | None,
    method: str | None,
) -> list[Said]:
    with_it, against = neighbours(index, first, NEIGHBOURS, weights, method)

    def labels(positions: list[int]) -> list[int | str]:
        return [named(int(suspects.given[n]), shown.classes) for n in positions]

    return [
        Said(named(int(suspects.predicted[i]), shown.classes), labels(a), labels(b))
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
