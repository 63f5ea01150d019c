"""What to know before the scores of an index are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from unde.data import Rows, to_device
from unde.default_device import program_default
from unde.errors import UndeError
from unde.gradients.feature_pass import exclusive
from unde.gradients.model_state import frozen_eval
from unde.gradients.parameters import placement
from unde.index.state import IndexState
from unde.scoring import diagnostics
from unde.scoring.documents import Pieces
from unde.scoring.group_scores import GroupScores
from unde.scoring.top import Top
from unde.tasks import Classification, MultiLabel
from unde.tasks.base import Task
from unde.tasks.tokens import TokenTask


def diagnose(
    at: IndexState, scores: GroupScores | None, top: Top | None, queries: Pieces | None
) -> list[str]:
    """See `Index.diagnose`. `queries` says which query each row of `scores` is a piece of, where they were cut."""
    if at.diagnosis is None:
        at.diagnosis = _of_model(at) + _of_examples(at)
    found = list(at.diagnosis)
    if scores is None:
        return found
    zero = diagnostics.zero_gradient_queries(scores.queries)
    names: Sequence[Any] = range(len(scores)) if scores.query_ids is None else scores.query_ids
    return found + diagnostics.describe_scores(zero, names, queries, top, scores.shape[1], at.ids)


def _of_examples(at: IndexState) -> list[str]:
    m, stored = at.stored.manifest, at.stored
    count = 0
    for s in range(len(m.shards)):
        parts = [stored.shard(c, s)["squares"].any(1) for c in range(m.terms)]
        count += int((~torch.stack(parts).any(0) & ~stored.skipped[m.shards[s]]).sum())
    return [diagnostics.describe_zero_examples(count, m.examples)] if count else []


def _of_model(at: IndexState) -> list[str]:
    """Whether the loss of the best checkpoint is near that of a guess, where the task says what a guess has."""
    if at.model is None or at.task is None or at.rows is None or at.stored.method.measure != "loss":
        return []
    outcomes = _outcomes(at.task, at.model, at.rows)
    if outcomes is None:
        return []
    usable = ~at.stored.skipped
    losses = [
        at.stored.values("loss", c)[usable].double().mean() for c in range(len(at.stored.manifest.models))
    ]
    best = float(torch.stack(losses).min())
    return [diagnostics.describe_unfitted(best, outcomes)] if diagnostics.unfitted(best, outcomes) else []


def _outcomes(task: Task, model: nn.Module, rows: Rows) -> int | None:
    """Among how many outcomes the model guesses, where the loss is their cross-entropy, averaged over tokens."""
    if isinstance(task, MultiLabel):
        return 2 if _plain(task, MultiLabel, "compare", "loss") else None
    try:
        batch = to_device(rows.batch([0]), placement(model)[0])
        with exclusive(model), frozen_eval(model), torch.no_grad(), program_default():
            if isinstance(task, Classification) and _plain(task, Classification, "compare", "loss"):
                return task.predict(model, batch)[0].shape[-1]
            same = ("_per_token", "token_losses", "loss")
            if isinstance(task, TokenTask) and task.reduction == "mean" and _plain(task, TokenTask, *same):
                return task.predictions(model, batch).logits.shape[-1]
    except (UndeError, RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError):
        pass  # nothing is said about a model that cannot be asked
    return None


def _plain(task: Task, kind: type, *names: str) -> bool:
    """Whether a task computes its loss as its kind does."""
    return all(getattr(type(task), name) is getattr(kind, name) for name in names)
