"""Attribution strength of parameter groups: metrics of their scores alone (Figures 1 and 2 of the paper)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from unde import console
from unde.errors import UndeError, explain
from unde.evaluate.arrays import Array, finite, numbers
from unde.evaluate.metrics import check_contributors, lds, rank, recall_at_k, skipped_examples
from unde.groups import unet_cell
from unde.scoring.base import Scores
from unde.scoring.data_splits import refuse_training

# Function from a parameter to its (row, column), or None to leave it out; or a regular expression for each, whose match
# (its first group, if it has one) is the name; or None, for each group as a row by itself.
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


def lds_strength(scores: Scores, masks: Array, utility: Array, *, cells: Cells = unet_cell) -> Heatmap:
    """Compute the mean LDS of scores from the groups of each cell alone.

    Args:
        scores: Scores resolved by group. A group must lie in one cell; regroup the scores if one is wider.
        masks: (S, N) bool, as for `lds`.
        utility: (S, Q), as for `lds`.
        cells: Row and column of each parameter: a function, or two regular expressions such as
            (r"layers\\.\\d+", r"attn|mlp"); None for each group as a row by itself. Default: block and component of a
            UNet.

    Returns:
        The LDS of each cell; nan where a cell has no groups.

    Example:
        >>> from unde.scoring.arrays import ArrayScores
        >>> rng = np.random.default_rng(0)
        >>> truth, noise = rng.normal(size=(2, 5, 40))
        >>> scores = ArrayScores(torch.tensor(np.stack([truth, noise], 2)), ["layers.0.attn", "layers.1.mlp"])
        >>> masks = rng.random((30, 40)) < 0.5
        >>> lds_strength(scores, masks, masks @ truth.T, cells=(r"layers\\.\\d+", r"attn|mlp")).values.round(1)
        array([[ 1. ,  nan],
               [ nan, -0.1]])
    """
    return _strengths(scores, cells, {"LDS": lambda total: lds(total, masks, utility).mean})["LDS"]


def recall_strength(
    scores: Scores, relevant: Mapping[str, Array], *, k: int = 10, cells: Cells = unet_cell
) -> dict[str, Heatmap]:
    """Compute the mean Recall@k for each attribute, of scores from the groups of each cell alone.

    Args:
        scores: Scores resolved by group.
        relevant: (Q, N) contributors of each query to each attribute, as for `fine_grained`.
        k: Number of top-ranked examples.
        cells: Row and column of each parameter, as for `lds_strength`.

    Returns:
        The recall of each cell by attribute; nan where a cell scores all training examples alike.

    Example:
        >>> from unde.scoring.arrays import ArrayScores
        >>> values = torch.eye(4)[:, :, None] * torch.tensor([1.0, -1.0])
        >>> scores = ArrayScores(values, ["mid_block.a", "mid_block.b"])
        >>> recall_strength(scores, {"style": np.eye(4, dtype=bool)}, k=1)["style"].values
        array([[1., 0.]])
    """
    excluded = skipped_examples(scores)

    def recall(total: np.ndarray, marks: np.ndarray) -> float:
        constant = (total == total[:, :1]).all()
        return np.nan if constant else recall_at_k(rank(total, k, excluded), marks).mean

    truth = check_contributors(relevant, scores.shape)
    metrics = {attribute: partial(recall, marks=marks) for attribute, marks in truth.items()}
    return _strengths(scores, cells, metrics)


def pattern_similarity(patterns: Mapping[str, Array]) -> Heatmap:
    """Compute the cosine similarity of patterns (M,), such as the per-group LDS or the weights of several settings.

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
    scores: Scores, cells: Cells, metrics: Mapping[str, Callable[[np.ndarray], float]]
) -> dict[str, Heatmap]:
    """Each metric of the totals of each cell."""
    refuse_training(scores)
    groups = _groups_by_cell(scores, cells)
    rows, columns = (list(dict.fromkeys(cell[axis] for cell in groups)) for axis in (0, 1))
    if cells is unet_cell:
        rows, columns = sorted(rows), sorted(columns)  # diffusers names mid_block last, after the up blocks
    values = {name: np.full((len(rows), len(columns)), np.nan) for name in metrics}
    with console.progress("strength of groups", len(groups), unit="groups") as advance:
        for (row, column), total in zip(groups, _totals(scores, list(groups.values()))):
            for name, metric in metrics.items():
                values[name][rows.index(row), columns.index(column)] = metric(total)
            advance(1)
    return {name: Heatmap(rows, columns, table) for name, table in values.items()}


def _totals(scores: Scores, members: Sequence[list[int]]) -> Iterator[np.ndarray]:
    """(Q, N) totals with weight one on the groups of each cell and zero on others, some cells at a time."""
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


def _groups_by_cell(scores: Scores, cells: Cells) -> dict[tuple[str, str], list[int]]:
    """Numbers of the groups in each cell."""
    if cells is None:
        return {(name, "alone"): [j] for j, name in enumerate(scores.groups)}
    cell_of = _classifier(cells)
    partition: Any = getattr(scores, "partition", None)
    members: Mapping[str, Sequence[str]] = {} if partition is None else partition.members
    out: dict[tuple[str, str], list[int]] = {}
    for j, group in enumerate(scores.groups):
        cells_of_group = {cell_of(name): name for name in members.get(group, [group])}
        if len(cells_of_group) > 1:
            (a, first), (b, second) = list(cells_of_group.items())[:2]
            raise UndeError(
                f"group {group!r} lies in several cells: {first!r} in {a}, {second!r} in {b}. Expected one for all its "
                "parameters: use finer groups, scores.regroup(Groups({n: (n,) for n in scores.partition.parameters}))"
            )
        (cell,) = cells_of_group
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
    with explain(f"cells are {cells!r}, which are not both regular expressions: {{e}}", re.error):
        row, column = map(re.compile, cells)

    def cell(name: str) -> tuple[str, str] | None:
        first, second = row.search(name), column.search(name)
        return first and second and (first[min(1, row.groups)], second[min(1, column.groups)])

    return cell
