"""Directions for the projection pca(r): leading eigenvectors of the covariances of inputs and output gradients.

One pass over a sample of the data gathers both covariances of every matrix at full width. A side that is too
wide for that (a vocabulary), and the rows of embeddings, whose inputs are one-hot, keep the random directions
of kron(r).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unde.data import Rows, evenly, to_device
from unde.features.collector import Collector, Use
from unde.features.factors import LIMIT, Factors
from unde.features.layers.embedding import Embedding
from unde.features.plan import plan_coverage
from unde.features.units import Unit, make_units, placement
from unde.linalg import eigh
from unde.projection import Spec
from unde.tasks.base import Task

SAMPLE = 256  # examples, evenly spaced


def fit(
    model: nn.Module,
    task: Task,
    rows: Rows,
    names: Sequence[str],
    spec: Spec,
    *,
    seed: int,
    measure: str,
    batch_size: int,
    memory: int,
) -> dict[str, Tensor]:
    """ "rows/<name>" (r, R) and "cols/<name>" (r, C) for every side that is wider than r."""
    units = make_units(model, names, Spec("kron", spec.size), seed)
    coverage = plan_coverage(model, task, rows, units, measure)
    wanted = {u.name: _sides(u, spec.size, coverage.uses) for u in units}
    factors = Factors({n: pair for n, pair in wanted.items() if any(pair)}, *placement(model))
    for u in units:  # those sides come to the factors as they are
        u.projection.widen(*(n is not None for n in wanted[u.name]))
    where = evenly(len(rows), SAMPLE)
    with Collector(model, task, units, coverage, measure, factors, emit=False) as collect:
        collect.fit(memory, rows.batch(where[:1]))
        for start in range(0, len(where), batch_size):
            ids = where[start : start + batch_size]
            collect(to_device(rows.batch(ids), collect.device), ids)
    return {
        f"{side}/{name}": _leading(total, spec.size, name)
        for name, pair in factors.sums.items()
        for side, total in zip(("rows", "cols"), pair)
        if total is not None and total.any()
    }


def _sides(unit: Unit, r: int, uses: Sequence[Use]) -> tuple[int | None, int | None]:
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
