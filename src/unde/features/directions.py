"""Directions for the projection pca(r): leading eigenvectors of the covariances of inputs and output gradients.

One pass over a sample of the data gathers both covariances of every matrix at full width. A side that is too
wide for that (a vocabulary), and the rows of embeddings, whose inputs are one-hot, keep the random directions
of kron(r).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unde.data import Rows, evenly
from unde.features.collector import Use
from unde.features.coverage import plan_coverage
from unde.features.factors import LIMIT
from unde.features.layers.embedding import Embedding
from unde.features.run import FeaturePass, Measurement, cuts, resized, settle
from unde.features.units import Unit, make_units
from unde.linalg import eigh
from unde.projection import Spec
from unde.tasks.base import Task

SAMPLE = 256  # examples, evenly spaced


@dataclass(frozen=True)
class Directions:
    """ "rows/<name>" (r, R) and "cols/<name>" (r, C) for every side that is wider than r; and how passes were cut."""

    matrices: dict[str, Tensor]
    size: int
    rows: int | None


def fit(
    model: nn.Module,
    task: Task,
    rows: Rows,
    names: Sequence[str],
    spec: Spec,
    *,
    seed: int,
    measure: str,
    memory: int,
    size: int | None = None,
) -> Directions:
    """Passes have `size` examples, or as many as fit the memory."""
    units = make_units(model, names, Spec("kron", spec.size), seed)
    coverage = plan_coverage(model, task, rows, units, measure)
    wanted = {u.name: sides_of(u, spec.size, coverage.uses) for u in units}
    factors = {n: pair for n, pair in wanted.items() if any(pair)}
    for u in units:  # those sides come to the factors as they are
        u.projection.widen(*(n is not None for n in wanted[u.name]))
    what = Measurement(units, measure, factors=factors, emit=False)
    in_pass = task.cutting.settled
    if size is None:
        size, in_pass = settle(model, task, rows, what, coverage, memory)
    where = Rows([rows[i] for i in evenly(len(rows), SAMPLE)], rows.collate)
    with FeaturePass(model, resized(task, in_pass), what, coverage) as run:
        for _ in run.over(where.batches(cuts(range(len(where)), size))):
            pass
        assert run.factors is not None
        sums = run.factors.sums
    found = {
        f"{side}/{name}": _leading(total, spec.size, name)
        for name, pair in sums.items()
        for side, total in zip(("rows", "cols"), pair)
        if total is not None and total.any()
    }
    return Directions(found, size, in_pass)


def sides_of(unit: Unit, r: int, uses: Sequence[Use]) -> tuple[int | None, int | None]:
    """The sides of a parameter that get directions of their own."""
    mine = [use for use in uses if any(u.name == unit.name for u in use.units.values())]
    whole = unit.projection.R * unit.projection.C <= r * r
    if len(unit.shape) < 2 or whole or not mine:
        return None, None
    looked_up = any(isinstance(use.rule, Embedding) for use in mine)
    rows, cols = unit.projection.R, unit.projection.C
    return (
        rows if r < rows <= LIMIT and not looked_up else None,
        cols if r < cols <= LIMIT else None,
    )


def _leading(covariance: Tensor, r: int, name: str) -> Tensor:
    """(r, n) orthonormal rows, largest eigenvalue first, the largest entry of each positive."""
    vectors = eigh(covariance.cpu(), name)[1][:, -r:].flip(1).T
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return (vectors * largest.sign()).to(torch.float32).contiguous()
