"""Baseline rows of a report: the examples that BM25 and hidden-state similarity rank first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from unde import console
from unde.data import Rows
from unde.errors import UndeError
from unde.evaluate.baselines import BM25, HIDDEN_STATES, bm25, state_scores
from unde.evaluate.hidden_states import HiddenStates
from unde.scoring import GroupScores
from unde.setup import Setup
from unde.tasks import Diffusion
from unde.ui.report.example_view import Shown
from unde.ui.report.items import Item, Scored, fold
from unde.ui.report.queries import QueryPanel, Row

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
    shown: Shown,
    count: int,
) -> list[QueryPanel]:
    """Panels with one more row for each baseline, for models of text; other panels are returned as they are.

    Args:
        panels: One panel for each query; their first row is unweighted.
        setup: The setup of the model.
        queries: The queries.
        scores: Scores of the queries.
        shown: How examples are shown.
        count: Examples in a row.
    """
    baselines = _scores(setup, queries, shown.train)
    if not baselines:
        return list(panels)
    k = min(TOP, len(shown.train))
    best = scores.top(k).indices  # (Q, k)
    ranked = {name: values.sort(descending=True, stable=True) for name, values in baselines.items()}
    made = []
    for q, panel in enumerate(panels):
        rows = list(panel.rows)
        for name, top in ranked.items():
            longest = max(k, count)
            pairs = list(zip(top.indices[q, :longest].tolist(), top.values[q, :longest].tolist()))
            shared = set(best[q].tolist()) & {i for i, _ in pairs[:k]}
            examples = [Scored(_beginning(shown.example(i)), value) for i, value in pairs[:count]]
            rows.append(Row(name, examples, shared=(len(shared), k)))
        made.append(replace(panel, rows=rows))
    return made


def _scores(setup: Setup, queries: Rows, train: Rows) -> dict[str, Tensor]:
    """(Q, N) scores of each baseline; none for models that do not read text."""
    if isinstance(setup.task, Diffusion):
        return {}
    train_texts = setup.texts(train)
    query_texts = None if train_texts is None else setup.texts(queries)
    if train_texts is None or query_texts is None:
        return {}
    found: dict[str, Tensor] = {}
    try:
        found[BM25] = bm25(train_texts, query_texts)
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
            found[HIDDEN_STATES] = similarity
    return found


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
