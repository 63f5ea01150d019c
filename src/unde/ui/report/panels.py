"""Panels of a page, made of an index, queries and weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unde import console
from unde.data import Rows
from unde.errors import UndeError
from unde.evaluate.baselines import BM25, HIDDEN_STATES, bm25, state_scores
from unde.evaluate.hidden_states import HiddenStates
from unde.index.labels import LabelPredictions
from unde.index.retrieval_curve import Trust
from unde.index.self_retrieval import summary
from unde.scoring import GroupScores, Top
from unde.setup import Setup
from unde.tasks import Diffusion
from unde.ui.report.example_view import ExampleView, class_name, label_predictions
from unde.ui.report.items import Item, ScoredItem, contributor_flags, fold, marks_for, same
from unde.ui.report.queries import QueryPanel, Row
from unde.ui.report.trust import TrustCurve, TrustPanel
from unde.ui.report.weights import WeightsPanel
from unde.weights import Weights

ALL_ZERO = "all scores are 0: these are neither proponents nor opponents"
Tokens = Callable[[int, int, Weights | None], Sequence[float] | Tensor | None]  # of query, example, weights


def predictions(setup: Setup, queries: Rows) -> list[int] | None:
    """The classes a classifier gives the queries; None for other tasks."""
    result = label_predictions(setup, queries)
    return None if result is None else result.predicted.tolist()


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
    view: ExampleView | None = None,
) -> list[QueryPanel]:
    """Panels of some queries: a row for each named way of weighting, proponents and opponents in it.

    `names` are what the queries are called, by default their positions. With `tokens` and `setup.pieces`, the
    tokens of training examples are shaded by what they add to the score, up to a share of `slack`. `contributors`
    marks the training examples that are known to have contributed to each of `queries`: (Q, N) bool for each
    name. `answers` are the model's, if they are at hand. Without `labelled`, the labels of queries are only what
    was asked about: nobody knows the true ones.
    """
    view = view or ExampleView(setup)
    train = view.train
    known = contributor_flags(
        contributors or {}, (len(queries), len(train)), "each query and training example"
    )
    marks = marks_for(known)
    predictions = answers or label_predictions(setup, queries)
    make = item or view.example

    def named_query(q: int) -> int | str:
        return q if names is None else names[q]

    def scored(q: int, top: Top, w: Weights | None) -> list[ScoredItem]:
        pairs = zip(top.indices[q].tolist(), top.values[q].tolist())
        return [
            ScoredItem(
                make(i),
                v,
                _parts(setup, train, tokens, q, i, w),
                [marks[name] for name, flags in known.items() if flags[q, i]],
                slack,
            )
            for i, v in pairs
        ]

    tops = {name: (scores.top(count, w), scores.top(count, w, largest=False)) for name, w in weights.items()}
    view.prepare(
        [
            *(partial(view.query, queries, q, named_query(q)) for q in which),
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
        query = view.query(queries, q, named_query(q))
        panels.append(_panel(query, rows, predictions, q, view, labelled))
    return panels


def _in_order(tops: Mapping[str, tuple[Top, Top]], which: Sequence[int]) -> list[int]:
    """All training examples of a page, the first ones of every query and way before the second ones."""
    columns = [top.indices[list(which)] for pair in tops.values() for top in pair]  # (q, k) each
    return list(dict.fromkeys(torch.stack(columns).permute(2, 1, 0).flatten().tolist()))


def _panel(
    query: Item,
    rows: list[Row],
    predictions: LabelPredictions | None,
    q: int,
    view: ExampleView,
    labelled: bool,
) -> QueryPanel:
    """A query with its prediction. Class numbers decide whether it is right, not names."""
    if predictions is None:
        return QueryPanel(query, rows)
    label, predicted = int(predictions.labels[q]), int(predictions.predicted[q])
    answer = class_name(predicted, view.classes)
    if not labelled:
        return QueryPanel(
            replace(query, label=None), rows, predicted=answer, asked=class_name(label, view.classes)
        )
    if query.true_label is not None:  # the label of the query is one that somebody asks about
        return QueryPanel(query, rows, predicted=answer)
    right = label == predicted
    if view.classes is None and query.label is not None and not same(label, query.label):
        answer = query.label if right else f"class {predicted}"  # `show` has names that nobody else knows
    return QueryPanel(query, rows, predicted=answer, right=right)


def _parts(
    setup: Setup, train: Rows, tokens: Tokens | None, q: int, i: int, weights: Weights | None
) -> list[tuple[str, float]] | None:
    """The pieces of training example i, each with what it adds to the score for query q; None if not known."""
    values = None if tokens is None or setup.pieces is None else tokens(q, i, weights)
    return None if values is None else pair_pieces(setup, train[i], i, values)


def pair_pieces(setup: Setup, row: Any, i: int, values: Sequence[float] | Tensor) -> list[tuple[str, float]]:
    """The pieces of training example i with a value for each."""
    pieces = [] if setup.pieces is None else setup.pieces(row)
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
    """The curves unweighted and under each named set of weights that is not uniform."""
    first = next(iter(trusts.values()))
    names = [name for name, w in weights.items() if not uniform(w)]
    curves = []
    for i, curve in enumerate(first.curves):
        points = {unweighted: curve.before}
        points |= {name: trusts[name].curves[i].after or [] for name in names}
        shares = {way: [(s, *curve.interval(s)) for s in some] for way, some in points.items()}
        curves.append(TrustCurve(curve.kind, curve.examples, curve.strengths, shares))
    means = {unweighted: _in_percent(first.before), **{name: _after(trusts[name]) for name in names}}
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
    """The verdict of the guard of self-retrieval on weights, as a sentence; empty without one.

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


SECONDS = 300.0  # limit for the pass that reads hidden states
TOP = 10  # examples that are compared with those of the method
_FIRST_SECONDS = 5.0  # before the duration of the pass is estimated


class TooLong(UndeError):
    """A pass that would take longer than its limit."""


def add_baselines(
    panels: Sequence[QueryPanel],
    setup: Setup,
    queries: Rows,
    scores: GroupScores,
    view: ExampleView,
    count: int,
) -> list[QueryPanel]:
    """Panels with one more row for each baseline, for models of text; other panels are returned as they are.

    Args:
        panels: One panel for each query; their first row is unweighted.
        setup: The setup of the model.
        queries: The queries.
        scores: Scores of the queries.
        view: The examples as items.
        count: Examples in a row.
    """
    baselines = _scores(setup, queries, view.train)
    if not baselines:
        return list(panels)
    k = min(TOP, len(view.train))
    best = scores.top(k).indices  # (Q, k)
    ranked = {name: values.sort(descending=True, stable=True) for name, values in baselines.items()}
    out = []
    for q, panel in enumerate(panels):
        rows = list(panel.rows)
        for name, top in ranked.items():
            longest = max(k, count)
            pairs = list(zip(top.indices[q, :longest].tolist(), top.values[q, :longest].tolist()))
            shared = set(best[q].tolist()) & {i for i, _ in pairs[:k]}
            examples = [ScoredItem(_beginning(view.example(i)), value) for i, value in pairs[:count]]
            rows.append(Row(name, examples, shared=(len(shared), k)))
        out.append(replace(panel, rows=rows))
    return out


def _scores(setup: Setup, queries: Rows, train: Rows) -> dict[str, Tensor]:
    """(Q, N) scores of each baseline; none for models that do not read text."""
    if isinstance(setup.task, Diffusion):
        return {}
    train_texts = setup.texts(train)
    query_texts = None if train_texts is None else setup.texts(queries)
    if train_texts is None or query_texts is None:
        return {}
    out: dict[str, Tensor] = {}
    try:
        out[BM25] = bm25(train_texts, query_texts)
    except UndeError as e:
        console.note(f"the page has no {BM25} column: {e}")
    try:
        reader = HiddenStates(setup.model, setup.task, train)
        with console.progress("hidden states", len(train)) as advance:
            similarity, _ = state_scores(reader, train, queries, _limited(advance, len(train)))
    except TooLong as e:
        console.note(f"the page has no column of {HIDDEN_STATES}: {e}")
    else:
        if similarity is not None:
            out[HIDDEN_STATES] = similarity
    return out


def _limited(advance: console.Advance, total: int) -> console.Advance:
    """`advance` that raises TooLong once the pass is estimated to take more than SECONDS."""
    begin, done = time.monotonic(), 0

    def step(amount: int, /, state: str | None = None) -> None:
        nonlocal done
        done += amount
        seconds = time.monotonic() - begin
        if seconds > _FIRST_SECONDS and seconds * total / done > SECONDS:
            raise TooLong(
                f"a pass over {total:,} training examples takes about {console.duration(seconds * total / done)}. "
                "The live page of `unde serve` computes it when it is switched on"
            )
        advance(amount, state)

    return step


def _beginning(item: Item) -> Item:
    """The item with the beginning of its text: whole texts twice would double the page."""
    head, rest = fold(item.text or "")
    return replace(item, text=f"{head.rstrip()} …") if rest else item
