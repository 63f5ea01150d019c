"""From an index, queries and weights to the panels of a report page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.data import Rows, to_device
from whence.features.guard import untouched
from whence.features.units import placement
from whence.report import Item, QueryPanel, Row, Scored, WeightsPanel
from whence.scores import GroupScores
from whence.setup import Setup
from whence.tasks import Classification
from whence.weights import Weights

Show = Callable[[Any], Any]


def as_item(example: Any, name: int | str, show: Show | None = None) -> Item:
    """How an example is shown: by the user's `show`, or as the image or text that it plainly is.

    >>> as_item({"text": "to be or not to be"}, 3).kind
    'text'
    """
    shown = show(example) if show is not None else _guess(example)
    if isinstance(shown, str):
        return Item(name, text=shown)
    if isinstance(shown, Mapping):
        return Item(name, **shown)
    if isinstance(shown, (Tensor, np.ndarray)):
        return Item(name, image=shown)
    return Item(name)


def _guess(example: Any) -> Any:
    if isinstance(example, Mapping) and isinstance(example.get("text"), str):
        return {"text": example["text"], "label": _label(example.get("label"))}
    if isinstance(example, (tuple, list)) and len(example) == 2:
        image = example[0] if _is_image(example[0]) else None
        return {"image": image, "label": _label(example[1])}
    return example if _is_image(example) else None


def _is_image(x: Any) -> bool:
    if not isinstance(x, (Tensor, np.ndarray)) or x.ndim not in (2, 3):
        return False
    return x.ndim == 2 or x.shape[0] in (1, 3) or x.shape[-1] in (1, 3)


def _label(y: Any) -> int | str | None:
    if isinstance(y, (Tensor, np.ndarray, np.generic)):
        return y.item() if getattr(y, "size", 1) == 1 or (isinstance(y, Tensor) and y.numel() == 1) else None
    return y if isinstance(y, (int, str)) else None


def predictions(setup: Setup, queries: Rows) -> list[int] | None:
    """The classes a classifier gives the queries; None for other tasks."""
    if not isinstance(setup.task, Classification):
        return None
    device, _ = placement(setup.model)
    with untouched(setup.model), torch.no_grad():
        logits = [
            setup.task.logits(
                setup.model, to_device(queries.batch(range(a, min(a + 64, len(queries)))), device)
            )
            for a in range(0, len(queries), 64)
        ]
    return torch.cat(logits).argmax(1).tolist()


def query_panels(
    setup: Setup,
    queries: Rows,
    scores: GroupScores,
    weights: Mapping[str, Weights | None],
    *,
    which: Sequence[int],
    count: int = 5,
    item: Callable[[int], Item] | None = None,
) -> list[QueryPanel]:
    """Panels of some queries: a row for each named way of weighting, proponents and opponents in it."""
    train = Rows(setup.train_data)
    if item is None:

        def item(i: int) -> Item:
            return as_item(train[i], i if setup.ids is None else setup.ids[i], setup.show)

    tops = {name: (scores.top(count, w), scores.top(count, w, largest=False)) for name, w in weights.items()}
    predicted = predictions(setup, queries)
    panels = []
    for q in which:
        rows = [
            Row(
                name,
                [Scored(item(i), v) for i, v in zip(best.indices[q].tolist(), best.values[q].tolist())],
                [Scored(item(i), v) for i, v in zip(worst.indices[q].tolist(), worst.values[q].tolist())],
            )
            for name, (best, worst) in tops.items()
        ]
        answer = None if predicted is None else predicted[q]
        panels.append(QueryPanel(as_item(queries[q], q, setup.show), rows, predicted=answer))
    return panels


def weights_panel(weights: Weights, note: str = "") -> WeightsPanel:
    curve = weights.provenance.get("objective", {}).get("curve") or None
    return WeightsPanel(weights.groups, weights.values.numpy(), objective=curve, note=note)
