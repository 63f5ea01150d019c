"""Directions for the projection pca(r): leading eigenvectors of the covariances of inputs and output gradients.

One pass over a sample adds up both covariances of every matrix at full width. A side that is too wide (a vocabulary),
and the rows of embeddings, whose inputs are one-hot, keep the random directions of kron(r).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unde import console
from unde.data import Rows, evenly
from unde.devices import put
from unde.errors import UndeError
from unde.gradients.coverage import plan_coverage
from unde.gradients.factors import LIMIT
from unde.gradients.feature_pass import FeaturePass, Measurement, choose_pass_size, set_rows, split_range
from unde.gradients.hooks import HookedModule
from unde.gradients.layers.embedding import Embedding
from unde.gradients.parameters import Unit, make_units
from unde.projection import Spec
from unde.tasks.base import Task

SAMPLE = 256  # examples, evenly spaced


class Directions(NamedTuple):
    matrices: dict[str, Tensor]  # "rows/<name>" (r, R) and "cols/<name>" (r, C)
    size: int  # examples in a pass
    rows: int | None  # rows in a pass, where a task makes several of an example


def compute_directions(
    model: nn.Module,
    task: Task,
    rows: Rows,
    names: Sequence[str],
    spec: Spec,
    *,
    seed: int,
    measure: str,
    memory: int,
    passes: tuple[int, int | None] | None = None,
) -> Directions:
    """The directions of a sample of `rows`, in passes as given or as they fit the memory."""
    units = make_units(model, names, Spec("kron", spec.size), seed)
    coverage = plan_coverage(model, task, rows, units, measure)
    sizes = {u.name: pca_sides(u, spec.size, coverage.modules) for u in units}
    for u in units:  # these sides reach the factors unprojected
        u.projection.widen(*(n is not None for n in sizes[u.name]))
    sizes = {name: pair for name, pair in sizes.items() if any(pair)}
    what = Measurement(units, measure, factors=sizes, emit=False)
    size, in_pass = passes or choose_pass_size(model, task, rows, what, coverage, memory)
    sample = Rows([rows[i] for i in evenly(len(rows), SAMPLE)], rows.collate)
    cuts = split_range(range(len(sample)), size)
    with (
        FeaturePass(model, set_rows(task, in_pass), what, coverage) as run,
        console.progress("pca directions", len(cuts), unit="passes") as advance,
    ):
        for _ in run.over(sample.batches(cuts)):
            advance(1)
        assert run.factors is not None
        total = run.factors.take().cpu()
    matrices, start = {}, 0
    for name, pair in sizes.items():
        for side, n in zip(("rows", "cols"), pair):
            if n is None:
                continue
            covariance = total[start : start + n * n].view(n, n)
            start += n * n
            if covariance.any():
                matrices[f"{side}/{name}"] = _leading(covariance, spec.size, name)
    return Directions(matrices, size, in_pass)


def pca_sides(unit: Unit, r: int, modules: Sequence[HookedModule]) -> tuple[int | None, int | None]:
    """The sizes of those sides of a parameter that get pca directions."""
    holders = [m for m in modules if unit.name in m.unit_names]
    whole = unit.projection.R * unit.projection.C <= r * r
    if len(unit.shape) < 2 or whole or not holders:
        return None, None
    looked_up = any(isinstance(m.rule, Embedding) for m in holders)
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


def eigh(matrix: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues, smallest first, and eigenvectors in columns of a covariance of the parameter `name`, in float64.

    >>> eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), "weight")[0]
    tensor([1., 2.], dtype=torch.float64)
    """
    matrix = put(matrix, matrix.device, torch.float64)
    if not matrix.isfinite().all():
        raise UndeError(
            f"a covariance of parameter {name!r} holds NaN or infinite entries: an example has a gradient that is "
            "not finite, or too large to square. Rebuild the index with on_bad='skip', or rescale the loss"
        )
    matrix = (matrix + matrix.T) / 2
    try:
        return torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # it fails to converge on rare matrices with many equal eigenvalues
        try:
            vectors, values, _ = torch.linalg.svd(matrix)
        except torch.linalg.LinAlgError as e:
            raise UndeError(
                f"no eigenvectors could be found for a covariance ({len(matrix)} × {len(matrix)}) of parameter "
                f"{name!r} ({e}): exclude the parameter, or build with another projection"
            ) from None
        return values.flip(0), vectors.flip(1)
