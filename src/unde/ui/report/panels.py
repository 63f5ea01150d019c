"""From an index, queries and weights to the panels of a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unde.data import Rows
from unde.errors import UndeError
from unde.index.labels import LabelPredictions
from unde.index.retrieval_curve import Trust
from unde.index.self_retrieval import summary
from unde.scoring import GroupScores, Top
from unde.setup import Setup
from unde.ui.report.classes import answers_to, named
from unde.ui.report.contributors import checked, marks_for
from unde.ui.report.example_view import Shown
from unde.ui.report.items import Item, Scored, same
from unde.ui.report.queries import QueryPanel, Row
from unde.ui.report.trust import TrustCurve, TrustPanel
from unde.ui.report.weights import WeightsPanel
from unde.weights import Weights

ALL_ZERO = "all scores are 0: these are neither proponents nor opponents"
Tokens = Callable[[int, int, Weights | None], Sequence[float] | Tensor | None]  # of query, example, weights


def predictions(setup: Setup, queries: Rows) -> list[int] | None:
    """The classes a classifier gives the queries; None for other tasks."""
    found = answers_to(setup, queries)
    return None if found is None else found.predicted.tolist()


def query_panels(
    setup: Setup,
    queries: Rows,
    scores: GroupScores,
    weights: Mapping[str, Weights | None],
    *,
    which: Sequence[int],
    count: int = 5,
    item: Callable[[int], Item] | None = None,
    names: Sequence[int | str] | None = None,
    tokens: Tokens | None = None,
    slack: float = 0.01,
    contributors: Mapping[str, Any] | None = None,
    answers: LabelPredictions | None = None,
    labelled: bool = True,
    shown: Shown | None = None,
) -> list[QueryPanel]:
    """Panels of some queries: a row for each named way of weighting, proponents and opponents in it.

    `names` are what the queries are called, by default their positions. With `tokens` and `setup.pieces`, the
    tokens of training examples are shaded by what they add to the score, up to a share of `slack`. `contributors`
    marks the training examples that are known to have contributed to each of `queries`: (Q, N) bool for each
    name. `answers` are the model's, if they are at hand. Without `labelled`, the labels of queries are only what
    was asked about: nobody knows the true ones.
    """
    shown = shown or Shown(setup)
    train = shown.train
    known = checked(contributors or {}, (len(queries), len(train)), "each query and training example")
    marks = marks_for(known)
    told = answers or answers_to(setup, queries)
    make = item or shown.example

    def named_query(q: int) -> int | str:
        return q if names is None else names[q]

    def scored(q: int, top: Top, w: Weights | None) -> list[Scored]:
        found = zip(top.indices[q].tolist(), top.values[q].tolist())
        return [
            Scored(
                make(i),
                v,
                _parts(setup, train, tokens, q, i, w),
                [marks[name] for name, flags in known.items() if flags[q, i]],
                slack,
            )
            for i, v in found
        ]

    tops = {name: (scores.top(count, w), scores.top(count, w, largest=False)) for name, w in weights.items()}
    shown.prepare(
        [
            *(partial(shown.query, queries, q, named_query(q)) for q in which),
            *(partial(make, i) for i in _in_order(tops, which)),
        ]
    )
    panels = []
    for q in which:
        rows = [
            Row(
                name,
                scored(q, best, weights[name]),
                scored(q, worst, weights[name]),
                note="" if best.values[q].any() or worst.values[q].any() else ALL_ZERO,
            )
            for name, (best, worst) in tops.items()
        ]
        query = shown.query(queries, q, named_query(q))
        panels.append(_panel(query, rows, told, q, shown, labelled))
    return panels


def _in_order(tops: Mapping[str, tuple[Top, Top]], which: Sequence[int]) -> list[int]:
    """All training examples of a page, the first ones of every query and way before the second ones."""
    columns = [top.indices[list(which)] for pair in tops.values() for top in pair]  # (q, k) each
    return list(dict.fromkeys(torch.stack(columns).permute(2, 1, 0).flatten().tolist()))


def _panel(
    query: Item, rows: list[Row], told: LabelPredictions | None, q: int, shown: Shown, labelled: bool
) -> QueryPanel:
    """A query with what the model says. Right and wrong are told by class numbers, whatever labels are called."""
    if told is None:
        return QueryPanel(query, rows)
    given, predicted = int(told.labels[q]), int(told.predicted[q])
    answer = named(predicted, shown.classes)
    if not labelled:
        return QueryPanel(
            replace(query, label=None), rows, predicted=answer, asked=named(given, shown.classes)
        )
    if query.true_label is not None:  # the label of the query is one that somebody asks about
        return QueryPanel(query, rows, predicted=answer)
    right = given == predicted
    if shown.classes is None and query.label is not None and not same(given, query.label):
        answer = query.label if right else f"class {predicted}"  # `show` has names that nobody else knows
    return QueryPanel(query, rows, predicted=answer, right=right)


def _parts(
    setup: Setup, train: Rows, tokens: Tokens | None, q: int, i: int, weights: Weights | None
) -> list[tuple[str, float]] | None:
    """The pieces of training example i, each with what it adds to the score for query q; None if not known."""
    values = None if tokens is None or setup.pieces is None else tokens(q, i, weights)
    if values is None or setup.pieces is None:
        return None
    pieces = setup.pieces(train[i])
    if len(pieces) != len(values):
        raise UndeError(
            f"Setup.pieces gives {len(pieces)} pieces for training example {i}, which has {len(values)} tokens: "
            "expected one for each"
        )
    return list(zip(pieces, map(float, values)))


def weights_panel(weights: Weights, note: str = "", name: str = "") -> WeightsPanel:
    curve = weights.provenance.get("objective", {}).get("curve") or None
    return WeightsPanel(weights.groups, weights.values.numpy(), objective=curve, note=note, name=name)


def weights_panels(weights: Mapping[str, Weights], groups: Sequence[str]) -> list[WeightsPanel]:
    """A panel for each named set of weights, all in the order of `groups`."""
    return [
        weights_panel(replace(w, values=w.aligned_to(groups), groups=list(groups)), name=name)
        for name, w in weights.items()
    ]


def trust_panel(
    trusts: Mapping[str, Trust], weights: Mapping[str, Weights], unweighted: str = "unweighted"
) -> TrustPanel:
    """What each named set of weights does to the curves; uniform weights have none of their own."""
    first = next(iter(trusts.values()))
    drawn = [name for name, w in weights.items() if not uniform(w)]
    curves = []
    for i, curve in enumerate(first.curves):
        found = {unweighted: curve.before}
        found |= {name: trusts[name].curves[i].after or [] for name in drawn}
        shares = {way: [(s, *curve.interval(s)) for s in some] for way, some in found.items()}
        curves.append(TrustCurve(curve.kind, curve.examples, curve.strengths, shares))
    means = {unweighted: _in_percent(first.before), **{name: _after(trusts[name]) for name in drawn}}
    verdicts = {name: words for name, w in weights.items() if (words := verdict(w))}
    note = "" if first.held_out else FEW
    return TrustPanel(curves, means, verdicts, note)


def uniform(weights: Weights) -> bool:
    """Whether weights are the unweighted method.

    >>> uniform(Weights.uniform(["a", "b"]))
    True
    """
    return bool((weights.values == 1).all())


FEW = (
    "There are too few training examples to leave some alone: these are the ones that self-retrieval reports on. "
    "Weights were not learned from them."
)


def verdict(weights: Weights) -> str:
    """What the guard of self-retrieval thought of weights, in a sentence; nothing if it was not asked.

    >>> verdict(Weights.uniform(["a"])), verdict(Weights(torch.ones(1), ["a"], [], {"confirmed": True}))
    ('', 'The guard of self-retrieval confirmed these weights.')
    """
    p = weights.provenance
    if "found" in p:
        words = summary(weights).replace("= -", "= −")
        return f"{words[0].upper()}{words[1:]}."
    if "confirmed" not in p:
        return ""
    if p["confirmed"]:
        return "The guard of self-retrieval confirmed these weights."
    return "The guard of self-retrieval confirmed none of the candidates: these weights are uniform."


def _in_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _after(trust: Trust) -> str:
    assert trust.after is not None and trust.gain is not None and trust.gain_ci95 is not None
    change = f"{100 * trust.gain:+.1f} ± {100 * trust.gain_ci95:.1f}".replace("-", "−")
    return f"{_in_percent(trust.after)} ({change})"
