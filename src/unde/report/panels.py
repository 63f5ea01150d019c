"""From an index, queries and weights to the panels of a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unde.data import Rows, to_device
from unde.errors import UndeError, unknown
from unde.features.guard import untouched
from unde.features.units import placement
from unde.index.self_retrieval import summary
from unde.index.trust import Trust
from unde.recipe import Setup
from unde.report.contributors import checked, marks_for
from unde.report.items import Item, Scored
from unde.report.queries import QueryPanel, Row
from unde.report.trust import TrustCurve, TrustPanel
from unde.report.weights import WeightsPanel
from unde.scores import GroupScores, Top
from unde.tasks import Classification
from unde.weights import Weights

Show = Callable[[Any], Any]
_SHOWN = [f.name for f in fields(Item) if f.name != "id"]
Tokens = Callable[[int, int, Weights | None], Sequence[float] | Tensor | None]  # of query, example, weights


def as_item(example: Any, name: int | str, show: Show | None = None) -> Item:
    """How an example is shown: by the user's `show`, or as the image or text that it plainly is.

    >>> as_item({"text": "to be or not to be"}, 3).kind
    'text'
    """
    shown = show(example) if show is not None else _guess(example)
    if isinstance(shown, str):
        return Item(name, text=shown)
    if isinstance(shown, Mapping):
        for key in shown:
            if key not in _SHOWN:
                raise unknown("key in what Setup.show returns", key, _SHOWN)
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
    names: Sequence[int | str] | None = None,
    tokens: Tokens | None = None,
    contributors: Mapping[str, Any] | None = None,
) -> list[QueryPanel]:
    """Panels of some queries: a row for each named way of weighting, proponents and opponents in it.

    `names` are what the queries are called, by default their positions. With `tokens` and `setup.pieces`, the
    tokens of training examples are shaded by what they add to the score. `contributors` marks the training examples
    that are known to have contributed to each of `queries`: (Q, N) bool for each name.
    """
    train = Rows(setup.train_data)
    known = checked(contributors or {}, (len(queries), len(train)), "each query and training example")
    marks = marks_for(known)

    @cache  # an example is on a page many times, and an image may have to be decoded
    def make(i: int) -> Item:
        return item(i) if item else as_item(train[i], i if setup.ids is None else setup.ids[i], setup.show)

    def scored(q: int, top: Top, w: Weights | None) -> list[Scored]:
        found = zip(top.indices[q].tolist(), top.values[q].tolist())
        return [
            Scored(
                make(i),
                v,
                _parts(setup, train, tokens, q, i, w),
                [marks[name] for name, flags in known.items() if flags[q, i]],
            )
            for i, v in found
        ]

    tops = {name: (scores.top(count, w), scores.top(count, w, largest=False)) for name, w in weights.items()}
    predicted = predictions(setup, queries)
    panels = []
    for q in which:
        rows = [
            Row(name, scored(q, best, weights[name]), scored(q, worst, weights[name]))
            for name, (best, worst) in tops.items()
        ]
        answer = None if predicted is None else predicted[q]
        panels.append(
            QueryPanel(
                as_item(queries[q], q if names is None else names[q], setup.show), rows, predicted=answer
            )
        )
    return panels


def _parts(
    setup: Setup, train: Rows, tokens: Tokens | None, q: int, i: int, weights: Weights | None
) -> list[tuple[str, float]] | None:
    """The pieces of training example i, each with what it adds to the score for query q; None if not known."""
    values = None if tokens is None or setup.pieces is None else tokens(q, i, weights)
    if values is None or setup.pieces is None:
        return None
    pieces = setup.pieces(train[i])
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
    """What each named set of weights does to the curves; uniform weights have none of their own."""
    first = next(iter(trusts.values()))
    drawn = [name for name, w in weights.items() if not uniform(w)]
    curves = []
    for i, curve in enumerate(first.curves):
        found = {unweighted: curve.before}
        found |= {name: trusts[name].curves[i].after or [] for name in drawn}
        shares = {way: [(s, *curve.interval(s)) for s in some] for way, some in found.items()}
        curves.append(TrustCurve(curve.kind, curve.examples, curve.strengths, shares))
    means = {unweighted: _in_percent(first.before), **{name: _after(trusts[name]) for name in drawn}}
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
    """What the guard of self-retrieval thought of weights, in a sentence; nothing if it was not asked.

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
