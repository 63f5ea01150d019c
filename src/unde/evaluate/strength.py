"""Attribution strength: how good are the scores of some parameter groups alone? (Figures 1 and 2 of the paper)"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from unde import console
from unde.errors import UndeError
from unde.evaluate.arrays import Array, finite, numbers
from unde.evaluate.lds import lds
from unde.evaluate.recall import contributors, ranked, recall_at_k, skipped
from unde.scoring.data_splits import refuse_training
from unde.unet import unet_cell
from unde.weights.protocol import ResolvedScores

# The row and column of a parameter, None to leave it out; or a regular expression for each, where what matches
# (its first group, if it has one) is the name; or None, which makes every group a row of its own.
Cells: TypeAlias = Callable[[str], tuple[str, str] | None] | tuple[str, str] | None


@dataclass(frozen=True, eq=False)
class Heatmap:
    """Named rows and columns of numbers.

    >>> Heatmap(["up_blocks.0", "mid_block"], ["ff"], np.array([[0.25], [np.nan]])).as_dict()
    {'rows': ['up_blocks.0', 'mid_block'], 'columns': ['ff'], 'values': [[0.25], [None]]}
    """

    rows: list[str]
    columns: list[str]
    values: np.ndarray  # (rows, columns), nan where there is nothing

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON, with None for nan."""
        values = [[None if np.isnan(v) else float(v) for v in row] for row in self.values]
        return {"rows": list(self.rows), "columns": list(self.columns), "values": values}


def lds_strength(
    scores: ResolvedScores, masks: Array, utility: Array, *, cells: Cells = unet_cell
) -> Heatmap:
    """The mean LDS of scores from the groups of each cell alone.

    `masks` (S, N) and `utility` (S, Q) are those of `lds`. `cells` gives each parameter a row and a column, by
    default block and component of a UNet; two regular expressions do so too, such as (r"layers\\.\\d+", r"attn|mlp").
    `cells=None` makes every group a row of its own. A group must lie in one cell: regroup the scores if one is wider.

    >>> from unde.scoring.arrays import ArrayScores
    >>> rng = np.random.default_rng(0)
    >>> truth, noise = rng.normal(size=(2, 5, 40))
    >>> scores = ArrayScores(torch.tensor(np.stack([truth, noise], 2)), ["layers.0.attn", "layers.1.mlp"])
    >>> masks = rng.random((30, 40)) < 0.5
    >>> found = lds_strength(scores, masks, masks @ truth.T, cells=(r"layers\\.\\d+", r"attn|mlp"))
    >>> found.rows, found.columns
    (['layers.0', 'layers.1'], ['attn', 'mlp'])
    >>> found.values.round(1)  # no group is in two of the cells
    array([[ 1. ,  nan],
           [ nan, -0.1]])
    """
    return _strengths(scores, cells, {"LDS": lambda total: lds(total, masks, utility).mean})["LDS"]


def recall_strength(
    scores: ResolvedScores, relevant: Mapping[str, Array], *, k: int = 10, cells: Cells = unet_cell
) -> dict[str, Heatmap]:
    """The mean Recall@k for each attribute, of scores from the groups of each cell alone.

    `relevant` marks the contributors of each query to each attribute, (Q, N), as for `fine_grained`; `cells` are those
    of `lds_strength`. A cell that gives every training example of a query the same score, for all queries, is nan:
    it ranks nothing.

    >>> from unde.scoring.arrays import ArrayScores
    >>> scores = ArrayScores(torch.eye(4)[:, :, None] * torch.tensor([1.0, -1.0]), ["mid_block.a", "mid_block.b"])
    >>> recall_strength(scores, {"style": np.eye(4, dtype=bool)}, k=1)["style"].values
    array([[1., 0.]])
    """
    truth, without = contributors(relevant, scores.shape), skipped(scores)

    def measure(marks: np.ndarray) -> Callable[[np.ndarray], float]:
        def recall(total: np.ndarray) -> float:
            if (total == total[:, :1]).all():
                return np.nan
            return recall_at_k(ranked(total, k, without), marks).mean

        return recall

    return _strengths(scores, cells, {attribute: measure(marks) for attribute, marks in truth.items()})


def pattern_similarity(patterns: Mapping[str, Array]) -> Heatmap:
    """Cosine similarity of each two patterns (M,), such as the per-group LDS or the weights of several settings.

    Groups where a pattern is nan are left out of all.

    >>> pattern_similarity({"a": np.array([1.0, 0.0]), "b": np.array([2.0, 2.0])}).values.round(3)
    array([[1.   , 0.707],
           [0.707, 1.   ]])
    """
    names = list(patterns)
    rows = [numbers(patterns[name], f"pattern {name!r}", "(M,)").astype(np.float64) for name in names]
    sizes = {name: len(row) for name, row in zip(names, rows)}
    if len(set(sizes.values())) != 1:
        raise UndeError(
            f"patterns of {sizes} groups: expected some, all over the same groups in the same order"
        )
    table = np.stack(rows)  # (patterns, M)
    table = table[:, ~np.isnan(table).any(axis=0)]
    finite(table, "patterns", ("pattern", "group"), "find out where they broke")
    norms = np.linalg.norm(table, axis=1, keepdims=True)
    if not norms.all():
        raise UndeError(
            f"pattern {names[int(np.argmin(norms))]!r} is zero in all {table.shape[1]} groups that every pattern has: "
            "it has no direction to compare. Leave it out"
        )
    return Heatmap(names, names, (table / norms) @ (table / norms).T)


def _strengths(
    scores: ResolvedScores, cells: Cells, metrics: Mapping[str, Callable[[np.ndarray], float]]
) -> dict[str, Heatmap]:
    """Each metric of the totals of each cell, which are made once for all metrics."""
    refuse_training(scores)
    groups_of = _layout(scores, cells)
    rows, columns = (list(dict.fromkeys(cell[axis] for cell in groups_of)) for axis in (0, 1))
    if cells is unet_cell:
        rows, columns = sorted(rows), sorted(columns)  # diffusers names mid_block last, after the up blocks
    values = {name: np.full((len(rows), len(columns)), np.nan) for name in metrics}
    with console.progress("strength of groups", len(groups_of), unit="groups") as advance:
        for (row, column), total in zip(groups_of, _totals(scores, list(groups_of.values()))):
            for name, metric in metrics.items():
                values[name][rows.index(row), columns.index(column)] = metric(total)
            advance(1)
    return {name: Heatmap(rows, columns, table) for name, table in values.items()}


def _totals(scores: ResolvedScores, members: Sequence[list[int]]) -> Iterator[np.ndarray]:
    """(Q, N) scores with weight one on the groups of each cell, zero elsewhere; as many at a time as memory holds."""
    queries, examples = scores.shape
    everyone, m = slice(0, queries), len(scores.groups)
    step = max(1, scores.memory // (8 * queries * examples))
    for start in range(0, len(members), step):
        chosen = members[start : start + step]
        indicators = [torch.zeros(m).index_fill(0, torch.tensor(js), 1.0) for js in chosen]
        totals = torch.empty(len(chosen), queries, examples)
        for train, parts in scores.stream(everyone):  # (Q, n, M)
            for total, js, w in zip(totals, chosen, indicators):
                total[:, train] = scores.finish(parts[:, :, js].sum(2), w.to(parts), everyone, train)
        yield from totals.numpy()


def _layout(scores: ResolvedScores, cells: Cells) -> dict[tuple[str, str], list[int]]:
    """The groups of each cell, by number."""
    if cells is None:
        return {(name, "alone"): [j] for j, name in enumerate(scores.groups)}
    cell_of = _classifier(cells)
    # Names of groups are free ("017:…" for consecutive ones); parameters are what lies in a block.
    partition: Any = getattr(scores, "partition", None)
    members: Mapping[str, Sequence[str]] = {} if partition is None else partition.members
    out: dict[tuple[str, str], list[int]] = {}
    for j, group in enumerate(scores.groups):
        found = {cell_of(name): name for name in members.get(group, [group])}
        if len(found) > 1:
            (a, first), (b, second) = list(found.items())[:2]
            raise UndeError(
                f"group {group!r} lies in several cells: {first!r} in {a}, {second!r} in {b}. Expected one for all its "
                "parameters: use finer groups, scores.regroup(Groups({n: (n,) for n in scores.partition.parameters}))"
            )
        (cell,) = found
        if cell is not None and not (isinstance(cell, tuple) and len(cell) == 2):
            raise UndeError(
                f"cells put {group!r} into {cell!r}: expected (row, column), or None to leave it out"
            )
        if cell is not None:
            out.setdefault(cell, []).append(j)
    if not out:
        raise UndeError(
            f"no group lies in a cell: cells leave out all {len(scores.groups)} of them, such as {scores.groups[0]!r}"
        )
    return out


def _classifier(cells: Any) -> Callable[[str], tuple[str, str] | None]:
    if callable(cells):
        return cells
    if not isinstance(cells, (tuple, list)) or len(cells) != 2:
        raise UndeError(
            f"cells are {cells!r}: expected a function from a name to (row, column), a regular expression for each, or "
            "None for each group by itself"
        )
    row, column = cells
    try:
        patterns = re.compile(row), re.compile(column)
    except re.error as e:
        raise UndeError(
            f"cells are ({row!r}, {column!r}), which are not both regular expressions: {e}"
        ) from None

    def cell(name: str) -> tuple[str, str] | None:
        first, second = (p.search(name) for p in patterns)
        if first is None or second is None:
            return None
        return first[min(1, patterns[0].groups)], second[min(1, patterns[1].groups)]

    return cell
