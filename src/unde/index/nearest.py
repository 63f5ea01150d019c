"""Labels of the training examples that are nearest to each example in the hidden states of a classifier."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unde import console
from unde.data import Rows, evenly, to_device
from unde.devices import put
from unde.errors import UndeError
from unde.evaluate.hidden_states import HiddenStates
from unde.gradients.parameters import placement
from unde.tasks import Classification, TokenClassification
from unde.tasks.tokens import IGNORE

NEAREST = 10
_POOL = 20_000  # examples or tokens that may be neighbours: more say hardly more
_BLOCK = 1024  # examples that are compared at once


def nearest_labels(
    model: nn.Module,
    task: Classification | TokenClassification,
    rows: Rows,
    which: Tensor,
    k: int,
    progress: bool = False,
) -> Tensor:
    """(N, k) labels of the k nearest other examples, in order, by the cosine of the inputs of the model's last layer.

    Of token labels, the neighbours are labelled tokens of all examples, and those of an example are the neighbours of
    its token `which`.

    Args:
        model: The classifier.
        task: Its task.
        rows: The training data.
        which: (N,) the token of each example whose label is audited, −1 for none; ignored for other tasks.
        k: How many neighbours; fewer where there are not so many.
        progress: Whether to show a progress bar.
    """
    reader = HiddenStates(model, task, rows)
    if reader.problem:
        raise UndeError(
            f"labels are compared with those of similar examples, and {reader.problem}: rank them by the loss instead, "
            'unde.index.labels.label_rankings(index, names=["loss"])'
        )
    states, labels, pool, own = [], [], [], []
    kept, seen = set(evenly(len(rows), _POOL)), 0
    with console.progress("hidden states", len(rows), progress) as advance:
        for batch in reader.ranges(rows):
            for row, (x, y, at) in zip(batch, _states(reader, task, rows, batch, which)):
                states.append(x[at])
                own.append(seen + at if row in kept else -1)
                if row in kept:
                    pool.append(x)
                    labels.append(y)
                    seen += len(x)
            advance(len(batch))
    pool_states = put(torch.cat(pool), placement(model)[0])
    return _vote(torch.stack(states), pool_states, torch.cat(labels), torch.tensor(own), k)


def _states(
    reader: HiddenStates, task: Classification | TokenClassification, rows: Rows, batch: range, which: Tensor
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(hidden states (n, d), labels (n,), which of them is audited) of each example: one, or some of its tokens."""
    if isinstance(task, Classification):
        hidden = reader.read(rows, batch).hidden
        _, labels = task.split(rows.batch(batch))
        assert hidden is not None
        yield from ((x[None], y.reshape(1).long(), 0) for x, y in zip(hidden.cpu(), labels.cpu()))
        return
    inputs = to_device(rows.batch(batch), placement(reader.model)[0])
    (_, target, _), hidden = reader.head_input(lambda: task.predictions(reader.model, inputs))
    most = max(1, _POOL // len(rows))
    for row, x, y in zip(batch, hidden.float().cpu(), target.cpu()):
        labelled = (y != IGNORE).nonzero()[:, 0]
        some = labelled[evenly(len(labelled), most)] if len(labelled) else torch.zeros(1, dtype=torch.int64)
        audited = max(0, int(which[row]))
        at = torch.cat([torch.tensor([audited]), some[some != audited]])
        yield x[at], y[at].long(), 0


def count_votes(neighbours: Tensor, classes: int) -> Tensor:
    """(N, classes) how many neighbours carry each class, by their labels (N, k).

    >>> count_votes(torch.tensor([[0, 2, 2]]), 3)
    tensor([[1, 0, 2]])
    """
    counts = torch.zeros(len(neighbours), classes, dtype=torch.int64)
    return counts.scatter_add(1, neighbours, torch.ones_like(neighbours))


def _vote(states: Tensor, pool: Tensor, labels: Tensor, own: Tensor, k: int) -> Tensor:
    """(N, k) labels of the members of the pool that are nearest to each of the states, without itself; products are
    computed where the pool is."""
    usable = labels != IGNORE
    number = usable.long().cumsum(0) - 1  # in the pool without what has no label
    own = torch.where((own >= 0) & usable[own.clamp(min=0)], number[own.clamp(min=0)], -1)
    pool, labels = F.normalize(pool[put(usable, pool.device)], dim=1), labels[usable]
    k = min(k, len(labels) - 1)
    if k < 1:
        raise UndeError(f"{len(labels)} labelled training examples: expected at least 2, to compare labels")
    out = torch.empty(len(states), k, dtype=torch.int64)
    for start in range(0, len(states), _BLOCK):
        some = slice(start, start + _BLOCK)
        cosines = F.normalize(put(states[some], pool.device), dim=1) @ pool.T
        inside = (own[some] >= 0).nonzero()[:, 0]
        itself = put(torch.stack([inside, own[some][inside]]), pool.device)
        cosines[itself[0], itself[1]] = -torch.inf
        out[some] = labels[cosines.nan_to_num(-2.0).topk(k).indices.cpu()]
    return out
