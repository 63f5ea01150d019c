"""A page of what an index says about some queries, with and without weights, and the panels of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unde import console
from unde.data import Rows
from unde.errors import UndeError
from unde.evaluate.baselines import BM25, HIDDEN_STATES, bm25, state_scores
from unde.evaluate.hidden_states import HiddenStates
from unde.index import Index
from unde.index.labels import LabelPredictions
from unde.scoring import GroupScores, Top
from unde.scoring.data_splits import describe_trained
from unde.scoring.documents import name_pieces
from unde.setup import Setup
from unde.tasks import Diffusion
from unde.ui.report.example_view import ExampleView, class_name, label_predictions
from unde.ui.report.items import Item, ScoredItem, contributor_flags, fold, marks_for, same
from unde.ui.report.page import Page, meaning
from unde.ui.report.queries import QueryPanel, Row
from unde.ui.report.weights import weights_panels
from unde.version import __version__
from unde.weights import Weights

if TYPE_CHECKING:
    from unde.index.token_scores import TokenScores


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

    def parts(q: int, i: int, w: Weights | None) -> list[tuple[str, float]] | None:
        values = None if tokens is None or setup.pieces is None else tokens(q, i, w)
        return None if values is None else pair_pieces(setup, train[i], i, values)

    def scored(q: int, top: Top, w: Weights | None) -> list[ScoredItem]:
        items = []
        for i, value in zip(top.indices[q].tolist(), top.values[q].tolist()):
            letters = [marks[name] for name, flags in known.items() if flags[q, i]]
            items.append(ScoredItem(make(i), value, parts(q, i, w), letters, slack))
        return items

    tops = {name: (scores.top(count, w), scores.top(count, w, largest=False)) for name, w in weights.items()}
    # All training examples of the page, the first ones of every query and way before the second ones.
    columns = torch.stack(
        [top.indices[list(which)] for pair in tops.values() for top in pair]
    )  # (lists, q, k)
    order = dict.fromkeys(columns.permute(2, 1, 0).flatten().tolist())
    view.prepare(
        [partial(view.query, queries, q, named_query(q)) for q in which] + [partial(make, i) for i in order]
    )
    panels = []
    for q in which:
        rows = []
        for name, (best, worst) in tops.items():
            note = "" if best.values[q].any() or worst.values[q].any() else ALL_ZERO
            rows.append(Row(name, scored(q, best, weights[name]), scored(q, worst, weights[name]), note))
        query = view.query(queries, q, named_query(q))
        panels.append(_panel(query, rows, predictions, q, view, labelled))
    return panels


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
        asked = class_name(label, view.classes)
        return QueryPanel(replace(query, label=None), rows, predicted=answer, asked=asked)
    if query.true_label is not None:  # the label of the query is one that somebody asks about
        return QueryPanel(query, rows, predicted=answer)
    right = label == predicted
    if view.classes is None and query.label is not None and not same(label, query.label):
        answer = query.label if right else f"class {predicted}"  # `show` has names that nobody else knows
    return QueryPanel(query, rows, predicted=answer, right=right)


def pair_pieces(setup: Setup, row: Any, i: int, values: Sequence[float] | Tensor) -> list[tuple[str, float]]:
    """The pieces of training example i with a value for each."""
    pieces = [] if setup.pieces is None else setup.pieces(row)
    if len(pieces) != len(values):
        raise UndeError(
            f"Setup.pieces gives {len(pieces)} pieces for training example {i}, which has {len(values)} tokens: "
            "expected one for each"
        )
    return list(zip(pieces, map(float, values)))


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
    """Panels with one more row for each baseline, for models of text; other panels are returned as they are."""
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


UNWEIGHTED, CALIBRATED = "unweighted", "calibrated"


def page_of(
    index: Index,
    setup: Setup,
    queries: Rows,
    scores: GroupScores,
    weights: Mapping[str, Weights],
    *,
    title: str,
    count: int = 5,
    names: Sequence[int | str] | None = None,
    contributors: Mapping[str, Any] | None = None,
    answers: LabelPredictions | None = None,
    labelled: bool = True,
    baselines: bool = True,
) -> Page:
    """The `count` strongest proponents and opponents of each query: unweighted, and under each named set of weights.

    Tokens are shaded where the setup knows their text. `baselines` adds the top examples of BM25 and of hidden-state
    similarity for models of text, the second from a pass over the training data. The rest is as in `query_panels`.
    """
    view = ExampleView(setup)
    if isinstance(scores.default_weights, Weights):
        weights = {CALIBRATED: scores.default_weights, **weights}
    ways: dict[str, Weights | None] = {UNWEIGHTED: Weights.uniform(scores.groups), **weights}
    count, shaded = min(count, scores.shape[1]), has_tokens(setup)
    # Tokens are not rounded as what is stored is: their parts may miss a share of the score.
    stored = index.manifest.codec
    slack = math.inf if stored.lossy else max(0.01, 3 * stored.rounding)
    steps = 2 * count * len(ways) * len(queries)
    with console.progress("shading tokens", steps, shaded, unit="passages") as advance:
        panels = query_panels(
            setup,
            queries,
            scores,
            ways,
            which=range(len(queries)),
            count=count,
            names=names,
            tokens=_tokens(index, setup, scores, advance) if shaded else None,
            slack=slack,
            contributors=contributors,
            answers=answers,
            labelled=labelled,
            view=view,
        )
    if baselines:
        panels = add_baselines(panels, setup, queries, scores, view, count)
    warnings = index.diagnose(scores if names is None else replace(scores, query_ids=names))
    inside = describe_trained(scores.trained_on(), name_pieces(range(len(queries)), len(queries), "queries"))
    warnings += [inside] if inside else []
    for sentence in warnings:
        console.note(sentence)
    return Page(
        title,
        f"{scores.shape[1]:,} training examples, {scores.method.name} attributions",
        queries=panels,
        weights=weights_panels(weights, scores.groups),
        meaning=meaning(scores.method, setup.task),
        calibration=index.calibration if "calibration" in scores.provenance else None,
        note=view.missing_note,
        warnings=warnings,
        provenance={"unde": __version__, "index": str(index.folder), **scores.provenance["method"]},
    )


def has_tokens(setup: Setup) -> bool:
    """Whether the parts that single tokens have in a score can be computed and shown."""
    return setup.pieces is not None and hasattr(setup.task, "token_losses")


def _tokens(index: Index, setup: Setup, scores: GroupScores, advance: console.Advance) -> Tokens:
    made: dict[int, TokenScores] = {}

    def tokens(q: int, i: int, weights: Weights | None) -> Tensor:
        if id(weights) not in made:
            made[id(weights)] = index.tokens(scores, weights)
        advance(1)
        return made[id(weights)](q, setup.train_data[i])

    return tokens
