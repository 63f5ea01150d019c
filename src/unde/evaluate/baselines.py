"""Baselines to compare an attribution method with: chance, shared words, similar hidden states, loss."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde import console
from unde.data import Collate, Rows, own_collate, plain_texts, to_device
from unde.errors import UndeError, unknown
from unde.evaluate.hidden_states import HiddenStates
from unde.gradients.model_state import frozen_eval
from unde.setup import Setup
from unde.tasks import Task

BM25, HIDDEN_STATES, LOSS = "BM25", "hidden-state similarity", "loss"  # names of the baselines
_WORDS: dict[str, Any] = {"stopwords": [], "show_progress": False}  # options of bm25s.tokenize
_SHORT_LIST = 12  # so many module names fit into an error message


def baseline_scores(
    model: nn.Module | None,
    task: Task | None,
    train_data: Any,
    queries: Any,
    *,
    collate: Collate | None = None,
    texts: tuple[Sequence[str], Sequence[str]] | None = None,
) -> dict[str, Tensor]:
    """Scores of the baselines that fit a task and its data.

    "BM25" is there if examples have texts and the package bm25s is installed. "hidden-state similarity" is the cosine
    of the inputs of the model's last layer, averaged over tokens or space. "loss" is the loss of the training example:
    it is the same for all queries and serves evaluation, not explanation. What is left out is said in a line. The
    model runs once on each training example and each query.

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
    train, asked = (Rows(data, collate or own_collate(task.collate, data)) for data in (train_data, queries))
    train_texts, query_texts = (plain_texts(train), plain_texts(asked)) if texts is None else texts
    found: dict[str, Tensor] = {}
    if train_texts is not None and query_texts is not None:
        if (len(train_texts), len(query_texts)) != (len(train), len(asked)):
            raise UndeError(
                f"{len(train_texts)} and {len(query_texts)} texts for {len(train)} training examples and "
                f"{len(asked)} queries: expected one text for each"
            )
        try:
            found[BM25] = bm25(train_texts, query_texts)
        except UndeError as e:
            console.note(f"no {BM25} baseline: {e}")
    with console.progress("baselines", len(train)) as advance:
        similarity, loss = state_scores(HiddenStates(model, task, train), train, asked, advance)
    if similarity is not None:
        found[HIDDEN_STATES] = similarity
    return {**found, LOSS: loss.expand(len(asked), -1)}


def state_scores(
    reader: HiddenStates, train: Rows, asked: Rows, advance: console.Advance
) -> tuple[Tensor | None, Tensor]:
    """Cosines of hidden states (Q, N), and training losses (N,).

    Args:
        reader: Reader of hidden states. If it has a problem, the problem is said in a line and the cosines are None.
        train: Training examples.
        asked: Queries.
        advance: Called with the number of training examples of each batch.
    """
    if reader.problem:
        console.note(f"no {HIDDEN_STATES} baseline: {reader.problem}")
    hidden = [] if reader.problem else [reader.read(asked, r).hidden for r in reader.ranges(asked)]
    wanted = torch.cat([part for part in hidden if part is not None]) if hidden else None  # (Q, d)
    similarity, loss = torch.empty(len(asked), len(train)), torch.empty(len(train))
    for r in reader.ranges(train):
        states = reader.read(train, r)
        loss[r.start : r.stop] = states.loss
        if wanted is not None and states.hidden is not None:
            similarity[:, r.start : r.stop] = _similarity(wanted, states.hidden, "cosine")
        advance(len(r))
    return (None if wanted is None else similarity), loss


def setup_baselines(setup: Setup, queries: Rows) -> dict[str, Tensor]:
    """`baseline_scores` of a setup, with the texts that its examples have or that its `show` gives."""
    train = setup.rows(setup.train_data)
    train_texts, query_texts = setup.texts(train), setup.texts(queries)
    texts = None if train_texts is None or query_texts is None else (train_texts, query_texts)
    return baseline_scores(setup.model, setup.task, train, queries, texts=texts)


def random_indices(n_train: int, queries: int, k: int, seed: int = 0) -> np.ndarray:
    """(Q, k) positions of k random training examples for each query, none twice in a row: the random baseline.

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
    drawn = np.empty((queries, k), dtype=np.int64)
    for q in range(queries):
        keys = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(q,))).random_raw(n_train)
        drawn[q] = np.argsort(keys, kind="stable")[:k]
    return drawn


def bm25(train_texts: Iterable[str], query_texts: Iterable[str]) -> Tensor:
    """(Q, N) BM25 scores of the training texts for each query text, by the package bm25s.

    Words are what its tokenizer finds: two or more letters, digits or underscores, in lower case. Nothing is
    stemmed and no stop word left out. The formula is Lucene's, with k1 = 1.5 and b = 0.75; a word that
    occurs twice in a query counts twice. A query that shares no word with any training text scores 0.

    Like all (Q, N) scores they go into `lds`, and `scores.topk(k).indices` into `recall_at_k` and `tail_patch`.

    >>> scores = bm25(["a red fox", "blue sky", "red sky at night"], ["the red fox"])
    >>> scores.topk(2).indices
    tensor([[0, 2]])
    """
    return WordIndex(train_texts).score(query_texts)


class WordIndex:
    """Training texts, ready to be scored by BM25 as in `bm25`.

    Raises:
        UndeError: The package bm25s is missing, or no text has a word.
    """

    def __init__(self, train_texts: Iterable[str]) -> None:
        try:
            import bm25s
        except ImportError:
            raise UndeError("BM25 comes from the package bm25s: pip install 'unde[hf]'") from None
        texts = _texts(train_texts, "train_texts")
        self._package, self.count = bm25s, len(texts)
        words: Any = bm25s.tokenize(texts, **_WORDS)
        if not words.vocab:
            raise UndeError("no training text has a word of two letters or more: BM25 has nothing to compare")
        self._index = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
        self._index.index(words, show_progress=False)

    def score(self, query_texts: Iterable[str]) -> Tensor:
        """(Q, N) scores of the training texts for each query text."""
        queries = _texts(query_texts, "query_texts")
        words: Any = self._package.tokenize(queries, return_ids=False, **_WORDS)
        scores = torch.empty(len(queries), self.count)
        for row, tokens in zip(scores, words):
            ids = self._index.get_tokens_ids(tokens)
            row.copy_(torch.from_numpy(self._index.get_scores_from_ids(ids)))
        return scores


def _texts(texts: Iterable[str], name: str) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    bad = next((i for i, text in enumerate(listed) if not isinstance(text, str)), None)
    if isinstance(texts, str) or not listed or bad is not None:
        what = "empty" if not listed else "a single string"
        if bad is not None:
            what = f"not all text: number {bad} is a {type(listed[bad]).__name__}"
        raise UndeError(f"{name} is {what}: expected a list of strings, one for each example")
    return listed


def representation_similarity(
    model: nn.Module,
    task: Task,
    train_data: Any,
    queries: Any,
    *,
    layer: str,
    batch_size: int = 32,
    metric: str = "cosine",
    collate: Collate | None = None,
) -> Tensor:
    """(Q, N) similarity of hidden states: what the module named `layer` gives for a query and a training example.

    Hidden states (B, T, d) are averaged over tokens, those that `attention_mask` keeps if the batch has one;
    (B, C, H, W) over space; (B, d) are taken as they are. If the module gives several things, the first
    counts; if it is called several times, the last call. `metric` is "cosine", or "l2" for the negative
    Euclidean distance: higher is closer in both.

    >>> from unde.tasks import Classification
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]), torch.zeros(3, dtype=torch.long)
    >>> model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    >>> representation_similarity(model, Classification(), (x, y), (x[:1], y[:1]), layer="0")
    tensor([[1.0000, 0.0000, 0.7071]])
    """
    if metric not in ("cosine", "l2"):
        raise unknown("metric", metric, ("cosine", "l2"))
    train, asked = (Rows(data, collate or own_collate(task.collate, data)) for data in (train_data, queries))
    device = _device(model)

    def hidden(rows: Rows, r: range) -> Tensor:
        batch = to_device(rows.batch(r), device)
        task.loss(model, batch)
        if not seen:
            raise UndeError(
                f"layer {layer!r} takes no part in the loss: expected a module that the model calls"
            )
        return _pooled(seen.pop(), f"layer {layer!r}", batch, len(r))

    with frozen_eval(model), torch.no_grad(), _outputs(model, layer) as seen:
        return _table(hidden, train, asked, batch_size, metric)


def representation_distance(
    encoder: Callable[[Any], Any],
    train_data: Any,
    queries: Any,
    *,
    batch_size: int = 32,
    collate: Collate | None = None,
) -> Tensor:
    """(Q, N) negative Euclidean distance of queries and training examples in the features of an encoder.

    The encoder is a module, which runs in eval mode on its own device, or a function. It is called with a
    batch as the data gives it, (B, 3, H, W) for a tensor of images, and must bring images to the size and range
    that it was trained on itself. What it gives is averaged as in `representation_similarity`, which asks a
    layer inside a model that has a task.

    >>> images = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1).expand(3, 3, 8, 8)
    >>> representation_distance(lambda batch: batch.mean((2, 3)), images, images[:1])
    tensor([[-0.0000, -0.8660, -1.7321]])
    """
    if not callable(encoder):
        raise UndeError(
            f"encoder is a {type(encoder).__name__}: expected a module, or a function from a batch to its features"
        )
    train, asked = Rows(train_data, collate), Rows(queries, collate)
    module = encoder if isinstance(encoder, nn.Module) else None

    def features(rows: Rows, r: range) -> Tensor:
        batch = rows.batch(r)
        batch = batch if module is None else to_device(batch, _device(module))
        return _pooled(encoder(batch), "the encoder", batch, len(r))

    with nullcontext() if module is None else frozen_eval(module), torch.no_grad():
        return _table(features, train, asked, batch_size, "l2")


def _table(
    features: Callable[[Rows, range], Tensor], train: Rows, asked: Rows, batch_size: int, metric: str
) -> Tensor:
    """(Q, N) similarity of the features (B, d) of queries and training examples, batch by batch."""
    if batch_size < 1:
        raise UndeError(f"batch_size is {batch_size}: expected at least 1")
    wanted = torch.cat([features(asked, r) for r in _cuts(asked, batch_size)])  # (Q, d)
    scores = torch.empty(len(asked), len(train))
    with console.progress("representations", len(train)) as advance:
        for r in _cuts(train, batch_size):
            scores[:, r.start : r.stop] = _similarity(wanted, features(train, r), metric).cpu()
            advance(len(r))
    return scores


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _cuts(rows: Rows, step: int) -> list[range]:
    return [range(a, min(a + step, len(rows))) for a in range(0, len(rows), step)]


@contextmanager
def _outputs(model: nn.Module, layer: str) -> Generator[list[Any]]:
    """A list that holds what the named module gave last."""
    modules = dict(model.named_modules())
    if not layer or layer not in modules:
        names = [name for name in modules if name]
        near = difflib.get_close_matches(layer, names, n=_SHORT_LIST, cutoff=0.3)
        raise unknown("layer", layer, names if len(names) <= _SHORT_LIST else near or names[:_SHORT_LIST])
    seen: list[Any] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        seen[:] = [output]

    handle = modules[layer].register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def _pooled(x: Any, source: str, batch: Any, examples: int) -> Tensor:
    """(B, d) from what `source` gave."""
    while not isinstance(x, Tensor):
        if isinstance(x, Mapping) and x:  # the outputs of transformers among them
            x = next(iter(x.values()))
        elif isinstance(x, (tuple, list)) and x:
            x = x[0]
        else:
            raise UndeError(f"{source} gives a {type(x).__name__}: expected a tensor, alone or first")
    if x.dim() not in (2, 3, 4) or len(x) != examples:
        raise UndeError(
            f"{source} gives shape {tuple(x.shape)} for {examples} examples: expected (B, d), (B, T, d) or "
            "(B, C, H, W), the examples first"
        )
    x = x.float()
    if x.dim() != 3:
        return x.flatten(2).mean(2) if x.dim() == 4 else x
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None:
        return x.mean(1)
    if mask.shape != x.shape[:2]:
        raise UndeError(
            f"{source} gives shape {tuple(x.shape)}, but attention_mask has shape {tuple(mask.shape)}: "
            f"expected {tuple(x.shape[:2])}, to tell tokens from padding. Take features that see all tokens"
        )
    kept = (mask != 0).to(x.dtype).unsqueeze(2)  # (B, T, 1)
    return (x * kept).sum(1) / kept.sum(1).clamp(min=1)


def _similarity(a: Tensor, b: Tensor, metric: str) -> Tensor:
    """(Q, d), (B, d) → (Q, B)."""
    if a.shape[1] != b.shape[1]:
        raise UndeError(
            f"features have {a.shape[1]} numbers for queries and {b.shape[1]} for training examples: "
            "expected as many for both"
        )
    if metric == "cosine":
        return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    # The shortcut through a matrix product loses the small distances, which matter most here.
    return -torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
