"""Queries about some words of a text: the loss is on the tokens of a span alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch

from unde import console
from unde.data import Rows
from unde.errors import UndeError
from unde.integrations.documents import TextSequences
from unde.setup import Setup
from unde.tasks import CausalLM, Preference, Seq2SeqLM
from unde.tasks.tokens import IGNORE


class SpanSequences(TextSequences):
    """Sequences with labels on a span."""

    def __init__(self, examples: list[dict[str, Any]], ids: list[str]) -> None:
        self.examples, self.ids = examples, ids

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.examples[index]


def span_queries(setup: Setup, span: str) -> SpanSequences:
    """The eval_queries of a setup with a loss on some of their words: why did the model say these?

    Args:
        setup: What `hf_setup` made, or a setup whose `pieces` give the text of each token.
        span: A part of the text of a query, taken literally. All its occurrences count.

    Returns:
        The queries that hold the span, with labels of −100 on all tokens outside of it.

    Raises:
        UndeError: If no query holds the span, or the task is none that predicts texts.

    >>> queries = span_queries(setup, "honest money")  # doctest: +SKIP
    >>> index.score(queries).top(5)  # doctest: +SKIP
    """
    if setup.pieces is None or not isinstance(setup.task, (CausalLM, Seq2SeqLM, Preference)):
        raise UndeError(
            f"--span {span!r}: words are asked about where the task predicts them one after another (CausalLM, "
            f"Seq2SeqLM, Preference) and the setup gives the text of each token (pieces); this is "
            f"{type(setup.task).__name__}"
        )
    rows = Rows(setup.eval_queries)
    names = getattr(setup.eval_queries, "ids", None) or [str(i) for i in range(len(rows))]
    examples, ids = [], []
    for i, name in enumerate(names):
        example = rows[i]
        if not isinstance(example, Mapping) or "input_ids" not in example:
            raise UndeError(f"--span {span!r}: query {name} is a pair of answers, expected a text")
        texts = setup.pieces(example)
        inside = tokens_of_span(texts, span)
        labels = torch.as_tensor(example.get("labels", example["input_ids"]))
        labels = labels.masked_fill(~torch.tensor(inside), IGNORE)
        first = 0 if isinstance(setup.task, Seq2SeqLM) else 1  # the first token is predicted from nothing
        if not (labels[first:] != IGNORE).any():
            continue
        examples.append({**example, "labels": labels})
        ids.append(str(name))
        words = "".join(t for t, chosen in zip(texts, inside) if chosen)
        console.line(f"query {name}: asked about {sum(inside)} of {len(texts)} tokens, {words.strip()!r}")
    if not examples:
        raise UndeError(
            f"--span {span!r} is in none of the {len(rows)} queries, at a place that the model predicts: expected "
            "words as they are written there, not the first token, and not across two sequences (--seq-len)"
        )
    return SpanSequences(examples, ids)


def tokens_of_span(texts: list[str], span: str) -> list[bool]:
    """Which tokens, given by their texts, have a character in an occurrence of the span.

    >>> tokens_of_span(["ho", "nest", " mon", "ey"], "nest mo")
    [False, True, True, False]
    """
    whole, inside = "".join(texts), [False] * len(texts)
    stops = list(accumulate(map(len, texts)))
    at = whole.find(span) if span else -1
    while at >= 0:
        for t, (text, stop) in enumerate(zip(texts, stops)):
            inside[t] |= bool(text) and stop - len(text) < at + len(span) and stop > at
        at = whole.find(span, at + 1)
    return inside
