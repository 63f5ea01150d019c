"""Baselines to compare an attribution method with: chance, shared words, similar hidden states, loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unde import console
from unde.data import Collate, Rows, choose_collate, plain_texts
from unde.default_device import host_default
from unde.errors import UndeError
from unde.evaluate.hidden_states import HiddenStates, similarity
from unde.setup import Setup
from unde.tasks import Task

BM25, HIDDEN_STATES, LOSS = "BM25", "hidden-state similarity", "loss"  # names of the baselines
_WORDS: dict[str, Any] = {"stopwords": [], "show_progress": False}  # options of bm25s.tokenize


@host_default
def baseline_scores(
    model: nn.Module | None,
    task: Task | None,
    train_data: Any,
    queries: Any,
    *,
    collate: Collate | None = None,
    texts: tuple[Sequence[str], Sequence[str]] | None = None,
) -> dict[str, Tensor]:
    """Compute the scores of the baselines that fit a task and its data.

    "BM25" needs texts and the package bm25s. "hidden-state similarity" is the cosine of the inputs of the model's last
    layer, averaged over tokens or space. "loss" is the loss of the training example, the same for all queries. A line
    says what is left out. The model runs once on each training example and each query.

    Args:
        model: The model; that of an index is `index.model`.
        task: Its task; `index.task`.
        train_data: The training data; `index.train_data`.
        queries: The queries.
        collate: Function that makes a batch; default: that of the data, or else of the task.
        texts: Texts of the training examples and of the queries; default: their field "text" or "sentence".

    Returns:
        (Q, N) scores of each baseline by its name.

    Raises:
        UndeError: The model, the task or the data are None, or texts do not fit the data.

    Example:
        >>> from unde.tasks import Classification
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]), torch.zeros(3, dtype=torch.long)
        >>> scores = baseline_scores(nn.Linear(2, 2), Classification(), (x, y), (x[:1], y[:1]))
        >>> list(scores), scores["hidden-state similarity"]
        (['hidden-state similarity', 'loss'], tensor([[1.0000, 0.0000, 0.7071]]))
    """
    if model is None or task is None or train_data is None:
        raise UndeError(
            "baselines need the model, its task and the training data: pass all three, or open the index with "
            "Index.open(..., model=, task=, train_data=)"
        )
    train, query_rows = (
        Rows(data, collate or choose_collate(task.collate, data)) for data in (train_data, queries)
    )
    train_texts, query_texts = (plain_texts(train), plain_texts(query_rows)) if texts is None else texts
    scores: dict[str, Tensor] = {}
    if train_texts is not None and query_texts is not None:
        if (len(train_texts), len(query_texts)) != (len(train), len(query_rows)):
            raise UndeError(
                f"{len(train_texts)} and {len(query_texts)} texts for {len(train)} training examples and "
                f"{len(query_rows)} queries: expected one text for each"
            )
        try:
            scores[BM25] = bm25(train_texts, query_texts)
        except UndeError as e:
            console.note(f"no {BM25} baseline: {e}")
    with console.progress("baselines", len(train)) as advance:
        cosines, loss = state_scores(HiddenStates(model, task, train), train, query_rows, advance)
    if cosines is not None:
        scores[HIDDEN_STATES] = cosines
    return {**scores, LOSS: loss.expand(len(query_rows), -1)}


def state_scores(
    reader: HiddenStates, train: Rows, queries: Rows, advance: console.Advance
) -> tuple[Tensor | None, Tensor]:
    """Cosines of hidden states (Q, N), None if the reader has a problem, and training losses (N,)."""
    if reader.problem:
        console.note(f"no {HIDDEN_STATES} baseline: {reader.problem}")
    states = [] if reader.problem else [reader.read(queries, r).hidden for r in reader.ranges(queries)]
    query_states = torch.cat([part for part in states if part is not None]) if states else None  # (Q, d)
    cosines, loss = torch.empty(len(queries), len(train)), torch.empty(len(train))
    for r in reader.ranges(train):
        batch = reader.read(train, r)
        loss[r.start : r.stop] = batch.loss
        if query_states is not None and batch.hidden is not None:
            cosines[:, r.start : r.stop] = similarity(query_states, batch.hidden, "cosine")
        advance(len(r))
    return (None if query_states is None else cosines), loss


def setup_baselines(setup: Setup, queries: Rows) -> dict[str, Tensor]:
    """`baseline_scores` of a setup, with the texts of its examples or of its `show`."""
    train = setup.rows(setup.train_data)
    train_texts, query_texts = setup.texts(train), setup.texts(queries)
    texts = None if train_texts is None or query_texts is None else (train_texts, query_texts)
    return baseline_scores(setup.model, setup.task, train, queries, texts=texts)


def random_indices(n_train: int, queries: int, k: int, seed: int = 0) -> np.ndarray:
    """Draw k random training examples for each query: (Q, k) positions, none twice in a row.

    Row q depends on (seed, q, n_train) only and is the same on every machine; a smaller k gives its beginning.

    >>> random_indices(n_train=1000, queries=2, k=3, seed=0).shape
    (2, 3)
    """
    if not 0 < k <= n_train:
        raise UndeError(f"k is {k}: expected 1 to {n_train}, the number of training examples")
    if queries < 1 or seed < 0:
        raise UndeError(
            f"queries is {queries} and seed {seed}: expected at least 1 query and a seed from 0 on"
        )
    rows = []
    for q in range(queries):
        keys = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(q,))).random_raw(n_train)
        rows.append(np.argsort(keys, kind="stable")[:k])
    return np.stack(rows)


def bm25(train_texts: Iterable[str], query_texts: Iterable[str]) -> Tensor:
    """Compute (Q, N) BM25 scores of the training texts for each query text, by the package bm25s.

    Words are two or more letters, digits or underscores, in lower case, without stemming or stop words. The formula is
    Lucene's with k1 = 1.5 and b = 0.75; a word that occurs twice in a query counts twice.

    >>> scores = bm25(["a red fox", "blue sky", "red sky at night"], ["the red fox"])
    >>> scores.topk(2).indices
    tensor([[0, 2]])
    """
    return WordIndex(train_texts).score(query_texts)


class WordIndex:
    """Training texts, ready to be scored by BM25 as in `bm25`."""

    def __init__(self, train_texts: Iterable[str]) -> None:
        try:
            import bm25s
        except ImportError:
            raise UndeError("BM25 comes from the package bm25s: pip install 'unde[hf]'") from None
        texts = _check_texts(train_texts, "train_texts")
        self._package, self.count = bm25s, len(texts)
        words: Any = bm25s.tokenize(texts, **_WORDS)
        if not words.vocab:
            raise UndeError("no training text has a word of two letters or more: BM25 has nothing to compare")
        self._index = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
        self._index.index(words, show_progress=False)

    def score(self, query_texts: Iterable[str]) -> Tensor:
        """(Q, N) scores of the training texts for each query text."""
        queries = _check_texts(query_texts, "query_texts")
        words: Any = self._package.tokenize(queries, return_ids=False, **_WORDS)
        scores = torch.empty(len(queries), self.count)
        for row, tokens in zip(scores, words):
            ids = self._index.get_tokens_ids(tokens)
            row.copy_(torch.from_numpy(self._index.get_scores_from_ids(ids)))
        return scores


def _check_texts(texts: Iterable[str], name: str) -> list[str]:
    items = list(texts)
    bad = next((i for i, text in enumerate(items) if not isinstance(text, str)), None)
    if isinstance(texts, str) or not items or bad is not None:
        what = "a single string" if isinstance(texts, str) else "empty"
        what = what if bad is None else f"not all text: number {bad} is a {type(items[bad]).__name__}"
        raise UndeError(f"{name} is {what}: expected a list of strings, one for each example")
    return items
