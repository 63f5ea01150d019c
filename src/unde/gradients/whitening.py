"""Whitening of whole gradients for EKFAC: the bases Q, the eigenvalues Λ and the damping λ, from two passes.

    feature of G = (Λ + λ)^−1/2 ⊙ (Q_leftᵀ G Q_right)          score = ⟨feature of the query, feature of the example⟩

The first pass adds up the covariances of both sides of every matrix, whose eigenvectors are Q. The second turns the
gradients and averages their squares, which are Λ. Biases and norms get the eigenvectors of their exact second moment.
A side without a covariance (a vocabulary) keeps its coordinates: Q = I ⊗ Q_right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unde import console
from unde.data import Rows, evenly
from unde.gradients.coverage import plan_coverage
from unde.gradients.factors import factor_sizes, length, split
from unde.gradients.feature_pass import FeaturePass, Measurement, choose_pass_size, set_rows, split_range
from unde.gradients.hooks import restore_coverage
from unde.gradients.parameters import DAMPINGS, Unit, describe_units, make_units
from unde.gradients.pca import eigh
from unde.tasks.base import Task

SAMPLE = 4096  # examples, evenly spaced, that statistics are taken from
EXACT = 4096  # entries of a vector that gets eigenvectors of its second moment
_SINGLE = 256  # rows of a covariance from which on eigenvectors are computed in float32


@dataclass(frozen=True)
class Statistics:
    """What the two passes run over.

    Args:
        model: The model; `checkpoints` gives contexts in which its weights are those of each checkpoint.
        task: The task, whose `measures` are differentiated: the loss, or losses of other labels.
        rows: The training data, of which a sample is read.
        names: The parameters.
    """

    model: nn.Module
    task: Task
    rows: Rows
    names: Sequence[str]
    measures: Sequence[str]
    checkpoints: Sequence[Callable[[], AbstractContextManager[None]]]

    @cached_property
    def coverages(self) -> list[dict[str, Any]]:
        """How gradients are computed under each checkpoint and measure."""
        plain, out = make_units(self.model, self.names, "none", 0), []
        for load in self.checkpoints:
            with load():
                out += [
                    plan_coverage(self.model, self.task, self.rows, plain, m).describe()
                    for m in self.measures
                ]
        return out

    def passes(
        self, units: Sequence[Unit], size: int, in_pass: int | None, title: str, emit: bool
    ) -> Iterator[Tensor]:
        """Features of the sample, pass by pass, under every checkpoint and measure; or sums of covariances.

        Examples whose gradients are not finite are left out: a build refuses or skips them by name.
        """
        factors = None if emit else factor_sizes(describe_units(units), "none")
        where = evenly(len(self.rows), SAMPLE)
        cuts = [where[r.start : r.stop] for r in split_range(range(len(where)), size)]
        runs = [(load, measure) for load in self.checkpoints for measure in self.measures]
        with console.progress(title, len(cuts) * len(runs), unit="passes") as advance:
            for (load, measure), record in zip(runs, self.coverages):
                with load():
                    coverage = restore_coverage(record, self.model, units)
                    what = Measurement(units, measure, factors=factors, emit=emit)
                    with FeaturePass(self.model, set_rows(self.task, in_pass), what, coverage) as run:
                        for cut in cuts:
                            yield self._features(run, cut) if emit else self._covariances(run, cut)
                            advance(1)

    def _features(self, run: FeaturePass, cut: Sequence[int]) -> Tensor:
        [result] = run.over(self.rows.batches([cut]))
        finite = result.features.isfinite().all(1)
        return result.features if finite.all() else result.features[finite]

    def _covariances(self, run: FeaturePass, cut: Sequence[int]) -> Tensor:
        assert run.factors is not None
        for _ in run.over(self.rows.batches([cut])):
            pass
        total = run.factors.take().cpu().double()
        if total.isfinite().all():
            return total
        if len(cut) == 1:
            return torch.zeros_like(total)
        return torch.stack([self._covariances(run, [i]) for i in cut]).sum(0)


def fit_whitening(
    data: Statistics,
    dampings: Callable[[Mapping[str, Tensor]], Mapping[str, float]],
    memory: int,
    passes: tuple[int, int | None] | None = None,
    exact: bool = False,
) -> tuple[dict[str, Tensor], tuple[int, int | None]]:
    """The matrices of whitening, and examples and rows in a pass.

    Args:
        data: Model, task and data.
        dampings: λ of each parameter from its eigenvalues, as the kernel has them.
        memory: Bytes that a pass may take half of.
        passes: Examples and rows in a pass, if they were decided before.
        exact: Whether small matrices that have no covariances get eigenvectors too, which are those of vectors.

    Returns:
        "rows/<name>" and "cols/<name>", the transposed bases of each side; "values/<name>", Λ; and "dampings", λ. With
        `exact`, "whole/<name>" is the transposed basis of a matrix without sides.
    """
    plain = make_units(data.model, data.names, "none", 0)
    if passes is None:
        what = Measurement(plain, data.measures[0])
        coverage = restore_coverage(data.coverages[0], data.model, plain)
        passes = choose_pass_size(data.model, data.task, data.rows, what, coverage, memory)
    matrices = _bases(data, plain, passes)
    units = make_units(data.model, data.names, "factored(1)", 0, matrices)
    sided = {name.partition("/")[2] for name in matrices}
    vectors = [u for u in units if len(u.shape) < 2 or (exact and u.name not in sided)]
    values, moments = _second_moments(data, units, vectors, passes)
    for u in units:
        at = values[u.columns]
        if u.name in moments:
            at, basis = eigh(moments[u.name], u.name)
            side = "cols" if len(u.shape) < 2 else "whole"
            matrices[f"{side}/{u.name}"] = basis.T.float().contiguous()
            at = at.clamp(min=0)
        matrices[f"values/{u.name}"] = at.float()
    lam = dampings({name: matrices[f"values/{name}"] for name in data.names})
    matrices[DAMPINGS] = torch.tensor([lam[name] for name in data.names], dtype=torch.float64)
    return matrices, passes


def _bases(data: Statistics, units: Sequence[Unit], passes: tuple[int, int | None]) -> dict[str, Tensor]:
    """The transposed eigenvectors of the covariances of each matrix that has them."""
    sizes = factor_sizes(describe_units(units), "none")
    if not sizes:
        return {}
    total = torch.zeros(length(sizes), dtype=torch.float64)
    for part in data.passes(units, *passes, "whitening: covariances", emit=False):
        total += part
    out: dict[str, Tensor] = {}
    for name, pair in split(total, sizes).items():
        given = [(side, c) for side, c in zip(("rows", "cols"), pair) if c is not None]
        if all(c.any() for _, c in given):
            for side, c in given:
                out[f"{side}/{name}"] = _eigenvectors(c, name).T.float().contiguous()
    return out


def _eigenvectors(covariance: Tensor, name: str) -> Tensor:
    """Eigenvectors of a covariance; large ones in float32, whose orthogonality suffices since Λ is measured."""
    if len(covariance) <= _SINGLE or not covariance.isfinite().all():
        return eigh(covariance, name)[1]
    scaled = (covariance / covariance.diagonal().mean()).float()
    try:
        return torch.linalg.eigh((scaled + scaled.T) / 2)[1]
    except torch.linalg.LinAlgError:
        return eigh(covariance, name)[1]


def _second_moments(
    data: Statistics, units: Sequence[Unit], vectors: Sequence[Unit], passes: tuple[int, int | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(P,) mean squares of turned gradients, and the second moments of short vectors."""
    vectors = [u for u in vectors if u.stop - u.start <= EXACT]
    squares = torch.zeros(units[-1].stop, dtype=torch.float64)
    moments = {u.name: torch.zeros(u.stop - u.start, u.stop - u.start, dtype=torch.float64) for u in vectors}
    for features in data.passes(units, *passes, "whitening: eigenvalues", emit=True):
        squares += features.square().sum(0)
        for u in vectors:
            g = features[:, u.columns].double()
            moments[u.name] += g.T @ g
    count = min(len(data.rows), SAMPLE) * len(data.checkpoints)  # labels of one example are one expectation
    return squares.div_(count), {name: total.div_(count) for name, total in moments.items()}
