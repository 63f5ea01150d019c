"""Choose training data for targets, as LESS does: examples whose gradients point to where those of the targets do.

    score(t, n) = Σ_c η_c cos(g_c(t), Γ_c(n)) / Σ_c η_c,    Γ = g / (√v + ε)

g(t) is the mean gradient of the queries of target t, Γ(n) the step of Adam on training example n, where the index was
built with second moments; without them it is the gradient. In an index of whole gradients Γ is on the training side
alone; in one of projected gradients each side has half of the metric, v^−1/4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unde import console
from unde.data import to_numpy
from unde.default_device import host_default
from unde.devices import put
from unde.errors import UndeError, unknown
from unde.evaluate.baselines import bm25
from unde.index import projection_matrices
from unde.index.index import Index
from unde.index.scorer import StoredFeatures
from unde.methods import Method, TracIn
from unde.projection import Spec
from unde.scoring.top import Table

if TYPE_CHECKING:
    import pandas as pd

STRATEGIES = ("max", "mean", "round-robin")
DUPLICATES = 0.95  # cosine of features from which an example is a near duplicate
SKETCH = 1024  # numbers of an example that near duplicates are found by, ± 0.003 at a cosine of 0.95


@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """The chosen training examples, in the order in which they were chosen; `unde.select` returns it.

    Attributes:
        indices: Positions in the pool, (k,).
        chosen_for: The target that each was chosen for.
        targets: Names of the targets.
        scores: Scores of all examples of the pool, (T, N).
        ids: The users' ids of all examples of the pool, if there are some.
        duplicates: How many near duplicates were passed over.
        texts: Texts of the chosen examples, if known.
    """

    indices: Tensor
    chosen_for: list[str]
    targets: list[str]
    scores: Tensor
    ids: Sequence[Any] | None = None
    duplicates: int = 0
    texts: Sequence[str | None] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def mask(self) -> Tensor:
        """(N,) bool: which examples of the pool are chosen."""
        mask = torch.zeros(self.scores.shape[1], dtype=torch.bool)
        mask[self.indices] = True
        return mask

    def rows(self) -> Table:
        """A row for each chosen example, with columns that need no pandas."""
        chosen = self.indices.tolist()
        columns: dict[str, Any] = {
            "rank": list(range(1, len(self) + 1)),
            "index": chosen,
            "id": chosen if self.ids is None else [self.ids[i] for i in chosen],
            "target": self.chosen_for,
            "score": [float(self.scores[self.targets.index(t), i]) for t, i in zip(self.chosen_for, chosen)],
        }
        if len(self.targets) > 1:
            columns |= {f"score {t}": to_numpy(self.scores[r, chosen]) for r, t in enumerate(self.targets)}
        if self.texts is not None:
            columns["text"] = list(self.texts)
        return Table(columns)

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each chosen example: rank, index, id, target, score, and the score of every target."""
        return self.rows().to_pandas()

    def summary(self) -> list[list[str]]:
        """For each target: its name, how many were chosen for it, their mean score, that of the pool, the best."""
        finite, out = torch.where(self.scores.isfinite(), self.scores, torch.nan), []
        for r, name in enumerate(self.targets):
            count = sum(target == name for target in self.chosen_for)
            numbers = finite[r, self.indices].mean(), finite[r].nanmean(), finite[r, self.indices].max()
            out.append([name, f"{count:,}", *(f"{float(x):+.3f}" for x in numbers)])
        return out

    def __repr__(self) -> str:
        out = f"Selection({len(self):,} of {self.scores.shape[1]:,} examples for {', '.join(self.targets)}"
        return out + (f"; {self.duplicates:,} near duplicates passed over)" if self.duplicates else ")")


@host_default
def select(
    index: Index,
    targets: Mapping[str, Any],
    budget: int | float | str,
    strategy: str = "max",
    *,
    method: str | Method | None = None,
    duplicates: float | None = DUPLICATES,
) -> Selection:
    """Choose the training examples that are worth most for some targets, in the manner of LESS.

    Args:
        index: The index of the pool to choose from, opened with its model and task. Build it from a model that was
            trained on some of the pool for a short while, with `checkpoints=`, `checkpoint_weights=` (learning rates)
            and `second_moments=`, which `unde.integrations.training.Recorder` keeps.
        targets: {name: queries}; queries are data like the training data, or their features.
        budget: How many examples, or which share of the pool, such as 0.05 or "5%".
        strategy: "max": by the best score for any target. "mean": by the mean score. "round-robin": targets choose
            in turns, so that each gets its share.
        method: A method of the index to score with in place of LESS, such as "ekfac".
        duplicates: An example whose features have at least this cosine with those of one chosen before is passed
            over; None takes all.

    Returns:
        What was chosen: `.indices`, and `.table` with scores.

    Raises:
        UndeError: There is no target or one without queries, the budget does not fit the pool, or the strategy is
            unknown.

    >>> chosen = unde.select(index, {"law": law, "chat": chat}, budget=0.05)  # doctest: +SKIP
    >>> chosen.table.head()  # doctest: +SKIP
    """
    if not isinstance(index, Index):
        raise UndeError(
            f"select chooses from an index, and got a {type(index).__name__}: build one of the pool, "
            "unde.Index.build(model, task, pool, path)"
        )
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    if not isinstance(targets, Mapping) or not targets:
        what = "empty" if isinstance(targets, Mapping) else f"a {type(targets).__name__}"
        raise UndeError(f"targets is {what}: expected {{name: queries}}, such as {{'law': queries}}")
    if duplicates is not None and not 0 < duplicates <= 1:
        raise UndeError(f"duplicates is {duplicates}: expected a cosine above 0 and up to 1, or None")
    pool = torch.arange(len(index))[~index.skipped]
    count = parse_budget(budget, len(pool))
    features = _target_features(index, targets)
    train = index._state.scorer.train_features(TracIn())
    if method is None:
        scores = _cosines(index, train, features)
    else:
        digests = [f"target {name}" for name in targets]
        chosen_method = index.method_for(method)
        scores = index._state.scorer.scores(chosen_method, features, digests).total()
    scores[:, index.skipped] = -torch.inf
    names, distinct = [str(name) for name in targets], _Distinct(train, count, duplicates)
    chosen = choose(scores, strategy, count, pool, distinct.accept)
    if len(chosen) < count:
        console.note(
            f"{len(chosen):,} of the {count:,} examples of the budget are chosen: all others are near duplicates of "
            "them (duplicates=None takes them too)"
        )
    indices, chosen_for = torch.tensor(list(chosen), dtype=torch.long), [names[t] for t in chosen.values()]
    return Selection(indices, chosen_for, names, scores, index.ids, distinct.passed)


def parse_budget(budget: int | float | str, pool: int) -> int:
    """The number of examples of a budget.

    >>> parse_budget(30, 200), parse_budget(0.05, 200), parse_budget("5%", 200), parse_budget("30", 200)
    (30, 10, 10, 30)
    """
    wanted = f"expected a number of examples from 1 to {pool:,}, or a share such as 0.05 or '5%'"
    value: Any = budget
    if isinstance(budget, str):
        text = budget.strip()
        try:
            value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            raise UndeError(f"budget is {budget!r}: {wanted}") from None
        value = int(value) if value == int(value) and not text.endswith("%") else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UndeError(f"budget is {budget!r}: {wanted}")
    if isinstance(value, int):
        if value > pool:
            raise UndeError(f"budget is {value:,} examples, and the pool holds {pool:,}: {wanted}")
        return value
    if value > 1:
        raise UndeError(f"budget is {budget!r}, more than the whole pool: {wanted}")
    return max(1, round(value * pool))


def _target_features(index: Index, targets: Mapping[str, Any]) -> Tensor:
    """(C, T, D): mean features of the queries of each target."""
    for name, queries in targets.items():
        if not hasattr(queries, "__len__") or not len(queries):
            raise UndeError(
                f"target {name!r} has no queries: expected data like the training data, such as 10 to 100 examples "
                "of what the model is to become better at"
            )
    return torch.cat([index.features(queries).mean().features for queries in targets.values()], 1)


def _cosines(index: Index, train: StoredFeatures, features: Tensor) -> Tensor:
    """(T, N) scores of LESS, from features (C, T, D) of the targets."""
    m = index.manifest
    if m.terms == 1:
        console.note(
            f"{index.folder} has one set of weights: scores are those of the final model alone. LESS adds up several "
            "checkpoints of a training (checkpoints=, checkpoint_weights=)"
        )
    scale = _adam_scale(index)
    scale, features = None if scale is None else put(scale, train.device), put(features, train.device)
    query_side = features if scale is None else torch.where(scale > 0, features / scale, 0.0)
    unit = features / _norms(query_side).unsqueeze(2)  # (C, T, D)
    total = sum(train.checkpoint_weights)
    scores = torch.zeros(features.shape[1], len(index))
    for rows, blocks in train.runs():
        for eta, q, block in zip(train.checkpoint_weights, unit, blocks):
            norms = _norms(block if scale is None else block * scale)
            scores[:, rows] += (eta / total * (q @ block.T) / norms).cpu()
    return scores


def _norms(x: Tensor) -> Tensor:
    """Norms of the rows; infinite instead of 0, so that rows of zeros have the score 0."""
    norms = torch.linalg.vector_norm(x, dim=-1)
    return torch.where(norms > 0, norms, torch.inf)


def _adam_scale(index: Index) -> Tensor | None:
    """(D,) (√v + ε)^−1/2 by which whole gradients of the index were multiplied; None for other features."""
    m = index.manifest
    scales = projection_matrices.read(projection_matrices.home(index.folder), m)
    names = [f"scale/{name}" for name in m.unit_names]
    whole = Spec.parse(str(index.method.projection)).kind == "none"
    if not whole or not all(name in scales for name in names):
        if not scales:
            console.note(
                f"{index.folder} has no second moments of the optimizer: gradients are compared as they are, without "
                "the metric of Adam (second_moments=)"
            )
        return None
    return torch.cat([scales[name].reshape(-1) for name in names])


def choose(
    scores: Tensor, strategy: str, count: int, pool: Tensor, accept: Callable[[int], bool] = lambda _: True
) -> dict[int, int]:
    """`count` examples of the pool by scores (T, N), best first, and the target that each is chosen for.

    >>> choose(torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]]), "round-robin", 3, torch.arange(3))
    {0: 0, 1: 1, 2: 0}
    """
    chosen: dict[int, int] = {}
    if strategy == "round-robin":
        orders = scores[:, pool].argsort(dim=1, descending=True, stable=True)
        rankings, seen = [iter(pool[order].tolist()) for order in orders], set[int]()
        while len(chosen) < count and len(seen) < len(pool):
            for t, ranking in enumerate(rankings[: count - len(chosen)]):
                for i in ranking:
                    if i in seen:
                        continue
                    seen.add(i)
                    if accept(i):
                        chosen[i] = t
                        break
        return chosen
    values, best = (scores.amax(0) if strategy == "max" else scores.mean(0)), scores.argmax(0).tolist()
    for i in pool[values[pool].argsort(descending=True, stable=True)].tolist():
        if len(chosen) == count:
            break
        if accept(i):
            chosen[i] = best[i]
    return chosen


def choose_by_words(
    texts: Sequence[str],
    targets: Mapping[str, Sequence[str]],
    budget: int | float | str,
    strategy: str = "max",
) -> Tensor:
    """The examples that share most words with the queries of the targets, by BM25: a control for `select`.

    >>> choose_by_words(["a red fox", "blue sky", "red sky"], {"sky": ["blue evening sky"]}, 2)
    tensor([1, 2])
    """
    scores = torch.stack([bm25(texts, queries).mean(0) for queries in targets.values()])
    count, pool = parse_budget(budget, len(texts)), torch.arange(len(texts))
    return torch.tensor(list(choose(scores, strategy, count, pool)), dtype=torch.long)


class _Distinct:
    """Accepts examples whose features, under the last checkpoint, are not those of one accepted before."""

    def __init__(self, train: StoredFeatures, count: int, limit: float | None) -> None:
        self.train, self.limit, self.passed, self.filled = train, limit, 0, 0
        width = train.columns[-1].stop
        self.sketched = width > SKETCH
        self.accepted = torch.empty(0 if limit is None else count, min(width, SKETCH), device=train.device)
        if self.sketched:
            generator = torch.Generator().manual_seed(0)
            self.buckets = put(torch.randint(SKETCH, (width,), generator=generator), train.device)
            self.signs = put(torch.randint(2, (width,), generator=generator) * 2.0 - 1, train.device)

    def accept(self, i: int) -> bool:
        if self.limit is None:
            return True
        row = self._unit(i)
        if self.filled and float((self.accepted[: self.filled] @ row).max()) >= self.limit:
            self.passed += 1
            return False
        self.accepted[self.filled] = row
        self.filled += 1
        return True

    def _unit(self, i: int) -> Tensor:
        row = self.train.rows(torch.tensor([i]))[-1][0]
        if self.sketched:
            row = row.new_zeros(SKETCH).index_add_(0, self.buckets, row * self.signs)
        return row / _norms(row)
