"""Queries that are in the training data: exact and near duplicates, and verbatim runs of words.

Texts are compared by their words, in lower case and without punctuation. All runs of 5 words (shingles) of the training
texts are sorted by hash, 16 bytes a word; those of a query are looked up, which gives the share of its shingles that
each training text holds, exactly and not by MinHash, and the longest common run by extending each match.

Images and other tensors are compared with the training examples that are nearest in the hidden states: they are near
duplicates if their values correlate, mirrored or not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.data import Rows, digest
from unde.errors import UndeError
from unde.evaluate.hidden_states import HiddenStates, similarity
from unde.setup import Setup
from unde.tasks import Classification

EXACT, NEAR, SPAN = "exact duplicate", "near duplicate", "verbatim run"
SHINGLE = 5  # words
NEAR_SHARE, NEAR_CORRELATION = 0.5, 0.95
SPAN_WORDS = 12  # a shorter common run is a turn of phrase
MOST = 5  # training examples listed for a query
_CANDIDATES = 10  # nearest images
_MATCHES = 200  # training places of one shingle: beyond, it is boilerplate


@dataclass(frozen=True)
class Overlap:
    """A query and a training example that share content.

    Attributes:
        query: Position of the query.
        example: Position of the training example.
        kind: "exact duplicate", "near duplicate" or "verbatim run".
        share: Of texts the share of the query's shingles that the example holds; of images the correlation.
        words: The length of the longest common run; 0 for images.
        passage: That run, as it stands in the query.

    >>> Overlap(query=0, example=7, kind="exact duplicate", share=1.0).example
    7
    """

    query: int
    example: int
    kind: str
    share: float
    words: int = 0
    passage: str = ""


def find_overlaps(setup: Setup, queries: Any, *, span_words: int = SPAN_WORDS) -> list[Overlap]:
    """Find queries that are in the training data of a setup, as a whole or in part.

    Args:
        setup: The setup; texts are those that `setup.text` gives, other examples are compared by their tensors.
        queries: The queries, as data or rows.
        span_words: The shortest common run of words that is reported.

    Returns:
        Overlaps by query, the closest first, at most 5 each.

    Raises:
        UndeError: If `span_words` is less than 5, or the setup does not fit its data.

    >>> find_overlaps(setup, setup.eval_queries)  # doctest: +SKIP
    """
    train, queries = setup.rows(setup.train_data), setup.rows(queries)
    texts = setup.texts(train)
    query_texts = None if texts is None else setup.texts(queries)
    if texts is not None and query_texts is not None:
        return text_overlaps(texts, query_texts, span_words=span_words)
    return tensor_overlaps(setup, train, queries)


def text_overlaps(
    train_texts: Sequence[str], query_texts: Sequence[str], *, span_words: int = SPAN_WORDS
) -> list[Overlap]:
    """Find query texts that are in training texts, as a whole or in part.

    Args:
        train_texts: The training texts.
        query_texts: The query texts.
        span_words: The shortest common run of words that is reported.

    Returns:
        Overlaps by query, the closest first, at most 5 each.

    Raises:
        UndeError: If `span_words` is less than 5.

    >>> train = ["The quick brown fox jumps over the lazy dog.", "Nothing to see here, please move on."]
    >>> text_overlaps(train, ["the quick brown fox jumps over the lazy DOG"])[0].kind
    'exact duplicate'
    >>> text_overlaps(train, ["A quick brown fox jumps over the lazy cat"], span_words=6)[0].passage
    'quick brown fox jumps over the lazy'
    """
    if span_words < SHINGLE:
        raise UndeError(f"span_words={span_words}: expected at least {SHINGLE}")
    for name, texts in (("train_texts", train_texts), ("query_texts", query_texts)):
        if isinstance(texts, str):
            raise UndeError(f"{name} is one text: expected a list of texts")
    index = _Shingles(train_texts)
    out: list[Overlap] = []
    for q, text in enumerate(query_texts):
        out += sorted(index.compare(q, text, span_words), key=lambda o: (-o.share, -o.words, o.example))[
            :MOST
        ]
    return out


class _Shingles:
    """Words of training texts, and their shingles sorted by hash."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.vocabulary: dict[str, int] = {}
        numbers = [self._numbers(text, new=True) for text in texts]
        self.words = np.concatenate([np.empty(0, np.int64), *numbers])
        self.stops = np.cumsum([len(n) for n in numbers])
        hashes = _hashes(self.words)
        ends = np.searchsorted(self.stops, np.arange(len(hashes)), side="right")
        whole = np.arange(len(hashes)) + SHINGLE <= self.stops[ends] if len(hashes) else np.empty(0, bool)
        places = np.flatnonzero(whole)  # of shingles that lie in one text
        order = np.argsort(hashes[places], kind="stable")
        self.hashes, self.places = hashes[places][order], places[order]
        short = [i for i, n in enumerate(numbers) if 0 < len(n) < SHINGLE]
        self.short = {tuple(numbers[i]): i for i in reversed(short)}

    def _numbers(self, text: str, new: bool = False) -> np.ndarray:
        words = [word.lower() for word in re.findall(r"\w+", text)]
        if new:
            return np.array([self.vocabulary.setdefault(w, len(self.vocabulary)) for w in words], np.int64)
        return np.array([self.vocabulary.get(w, -1 - i) for i, w in enumerate(words)], np.int64)

    def compare(self, query: int, text: str, span_words: int) -> list[Overlap]:
        words = self._numbers(text)
        if len(words) < SHINGLE:
            example = self.short.get(tuple(words))
            return [] if example is None else [Overlap(query, example, EXACT, 1.0, len(words), text.strip())]
        hashes = _hashes(words)
        first, last = (np.searchsorted(self.hashes, hashes, side=side) for side in ("left", "right"))
        seen: dict[int, set[int]] = {}  # shingles of the query by example
        runs: dict[int, tuple[int, int]] = {}  # (length, start in the query) of the longest one
        reached: dict[int, int] = {}  # end in the query of the run on each diagonal
        for at, (a, b) in enumerate(zip(first.tolist(), np.minimum(last, first + _MATCHES).tolist())):
            for place in self.places[a:b].tolist():
                example = int(np.searchsorted(self.stops, place, side="right"))
                seen.setdefault(example, set()).add(int(hashes[at]))
                if reached.get(place - at, 0) > at:
                    continue
                length = self._run(words, at, place, int(self.stops[example]))
                reached[place - at] = at + length
                runs[example] = max(runs.get(example, (0, 0)), (length, at), key=lambda run: run[0])
        total = len(set(hashes.tolist()))
        out = []
        for example, shingles in seen.items():
            share, (length, start) = len(shingles) / total, runs[example]
            begin = int(self.stops[example - 1]) if example else 0
            equal = length == len(words) == int(self.stops[example]) - begin
            kind = EXACT if equal else NEAR if share >= NEAR_SHARE else SPAN
            if kind != SPAN or length >= span_words:
                out.append(Overlap(query, example, kind, share, length, _passage(text, start, length)))
        return out

    def _run(self, words: np.ndarray, at: int, place: int, stop: int) -> int:
        """The number of equal words from here on."""
        most = min(len(words) - at, stop - place)
        differ = np.flatnonzero(words[at : at + most] != self.words[place : place + most])
        return int(differ[0]) if len(differ) else most


def _hashes(words: np.ndarray) -> np.ndarray:
    """A hash of each run of SHINGLE words."""
    count = max(0, len(words) - SHINGLE + 1)
    out = np.zeros(count, np.uint64)
    for k in range(SHINGLE):
        mixed = (words[k : k + count].astype(np.uint64) + np.uint64(k + 1)) * np.uint64(0x9E3779B97F4A7C15)
        out = (out ^ (mixed ^ (mixed >> np.uint64(29)))) * np.uint64(0xBF58476D1CE4E5B9)
    return out


def _passage(text: str, start: int, length: int) -> str:
    """Some words of a text as they are written there."""
    words = list(re.finditer(r"\w+", text))
    return " ".join(text[words[start].start() : words[start + length - 1].end()].split())


def tensor_overlaps(setup: Setup, train: Rows, queries: Rows) -> list[Overlap]:
    """Find queries whose tensors equal or nearly equal those of training examples; see `find_overlaps`."""
    reader = HiddenStates(setup.model, setup.task, train)
    states = []
    for rows in (train, queries):
        parts = [reader.read(rows, r).hidden for r in reader.ranges(rows)]
        states.append(None if reader.problem else torch.cat([p for p in parts if p is not None]))
    digests: dict[str, int] = {}
    for i in range(len(train)):
        digests.setdefault(digest(_content(setup, train, i)), i)
    out = []
    for q in range(len(queries)):
        content = _content(setup, queries, q)
        equal = digests.get(digest(content))
        if equal is not None:
            out.append(Overlap(q, equal, EXACT, 1.0))
        if states[0] is None or states[1] is None or not isinstance(content, Tensor):
            continue
        nearest = similarity(states[1][q : q + 1], states[0], "cosine")[0]
        found = []
        for i in nearest.topk(min(_CANDIDATES, len(train))).indices.tolist():
            correlation = _correlation(content, _content(setup, train, i))
            if i != equal and correlation >= NEAR_CORRELATION:
                found.append(Overlap(q, i, NEAR, correlation))
        out += sorted(found, key=lambda o: -o.share)[: MOST - (equal is not None)]
    return out


def _content(setup: Setup, rows: Rows, i: int) -> Any:
    """An example without its label."""
    if isinstance(setup.task, Classification):
        inputs, _ = setup.task.split(rows.batch([i]))
        return inputs[0] if isinstance(inputs, Tensor) else inputs
    example = rows[i]
    return example[0] if isinstance(example, (tuple, list)) and len(example) else example


def _correlation(a: Tensor, b: Any) -> float:
    """Of the values of two tensors, or of one with the other mirrored."""
    if not isinstance(b, Tensor) or a.shape != b.shape or a.numel() < 2:
        return 0.0
    pairs = [(a, b), *([(a.flip(-1), b)] if a.dim() >= 2 else [])]
    values = [
        torch.corrcoef(torch.stack([x.flatten().double(), y.flatten().double()]))[0, 1] for x, y in pairs
    ]
    return max(float(v.nan_to_num(0.0)) for v in values)
