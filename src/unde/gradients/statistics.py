"""Sums over a sample of the training data, which kernels of whole gradients and whitening are made of.

They are squares of gradients, second moments of short vectors, and covariances of the two sides of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unde import console
from unde.data import Rows, evenly
from unde.gradients.coverage import plan_coverage
from unde.gradients.factors import Factors, Sides, eigh
from unde.gradients.feature_pass import FeaturePass, Measurement, set_rows, split_range
from unde.gradients.hooks import restore_coverage
from unde.gradients.parameters import Unit, describe_units, make_units
from unde.tasks.base import Task

SAMPLE = 4096  # examples, evenly spaced, that statistics are taken from
EXACT = 4096  # entries of a vector that gets eigenvectors of its second moment
_SINGLE = 256  # rows of a covariance beyond which sums and eigenvectors are computed in float32
_PART = 2**16  # columns whose squares are summed together

Passes = tuple[int, int | None]  # examples in a pass, and rows where a task makes several of an example


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

    @property
    def count(self) -> int:
        """Gradients in the sample; labels of one example are one expectation."""
        return min(len(self.rows), SAMPLE) * len(self.checkpoints)

    def runs(
        self,
        units: Sequence[Unit],
        passes: Passes,
        title: str,
        what: Measurement,
        bad: Set[int] = frozenset(),
        sample: int = SAMPLE,
    ) -> Iterator[tuple[FeaturePass, Sequence[int]]]:
        """The examples of each pass over the sample but for `bad` ones, under every checkpoint and measure."""
        size, in_pass = passes
        where = [i for i in evenly(len(self.rows), sample) if i not in bad]
        cuts = [where[r.start : r.stop] for r in split_range(range(len(where)), size)]
        runs = [(load, measure) for load in self.checkpoints for measure in self.measures]
        factors = None if what.factors is None else Factors(what.factors, self.model)
        with console.progress(title, len(cuts) * len(runs), unit="passes") as advance:
            for (load, measure), record in zip(runs, self.coverages):
                with load():
                    coverage = restore_coverage(record, self.model, units)
                    measured = replace(what, measure=measure)
                    with FeaturePass(
                        self.model, set_rows(self.task, in_pass), measured, coverage, factors
                    ) as run:
                        for cut in cuts:
                            yield run, cut
                            advance(1)

    def features(
        self,
        units: Sequence[Unit],
        passes: Passes,
        title: str,
        some: Sequence[Unit] | None = None,
        sample: int = SAMPLE,
    ) -> Iterator[Tensor]:
        """Features of the sample, pass by pass; those of `some` of the units alone.

        Examples whose gradients are not finite are left out: a build refuses or skips them by name. The next pass
        overwrites what is given out.
        """
        what = Measurement(units if some is None else some)
        buffer = torch.empty(passes[0], what.units[-1].stop)  # of all passes: new memory is slow
        for run, cut in self.runs(units, passes, title, what, sample=sample):
            [result] = run.over(self.rows.batches([cut]), [buffer[: len(cut)]])
            yield _finite_rows(result.features)

    def covariances(
        self,
        units: Sequence[Unit],
        passes: Passes,
        title: str,
        sizes: Mapping[str, Sides],
        squares: Squares | None = None,
    ) -> dict[str, list[Tensor | None]]:
        """The covariances of the sides of each matrix, those of short sides in float64. `squares` are added up, too.

        Where one is not finite, the examples that make it so are sought, and left out.
        """
        totals = self._add_up(units, passes, title, sizes, squares, frozenset())
        if not all(t.isfinite().all() for pair in totals.values() for t in pair if t is not None):
            totals.clear()
            bad = self._bad_examples(units, passes, title, sizes)
            totals = self._add_up(units, passes, title, sizes, squares, bad)
        return totals

    def _add_up(
        self,
        units: Sequence[Unit],
        passes: Passes,
        title: str,
        sizes: Mapping[str, Sides],
        squares: Squares | None,
        bad: Set[int],
    ) -> dict[str, list[Tensor | None]]:
        """Long sides are added up where they are, in the model's precision: there is one copy of them."""
        short = {
            name: [torch.zeros(n, n, dtype=torch.float64) if n and n <= _SINGLE else None for n in pair]
            for name, pair in sizes.items()
        }
        what, sums = Measurement(units, factors=sizes, emit=False), dict[str, tuple[Tensor | None, ...]]()
        buffer = None
        if squares is not None:
            squares.clear()
            what, buffer = Measurement(squares.units, factors=sizes), squares.buffer(passes[0])
        for run, cut in self.runs(units, passes, title, what, bad):
            if squares is None or buffer is None:
                _run_only(run, self.rows, cut)
            else:
                [result] = run.over(self.rows.batches([cut]), [buffer[: len(cut)]])
                squares.add(_finite_rows(result.features))
            assert run.factors is not None
            sums = run.factors.sums
            for name, pair in short.items():
                for total, part in zip(pair, sums[name]):
                    if total is not None and part is not None:
                        total += part.cpu()
                        part.zero_()
        return {
            name: [part if total is None else total for total, part in zip(pair, sums[name])]
            for name, pair in short.items()
        }

    def _bad_examples(
        self, units: Sequence[Unit], passes: Passes, title: str, sizes: Mapping[str, Sides]
    ) -> set[int]:
        bad, what = set[int](), Measurement(units, factors=sizes, emit=False)
        for run, cut in self.runs(units, passes, title, what):
            if not _is_finite(run, self.rows, cut):
                bad |= {i for i in cut if not _is_finite(run, self.rows, [i])}
        return bad


class Squares:
    """Sums over examples of the squares of gradients, and of the second moments of short vectors.

    Args:
        units: Some parameters, in any columns.
        sided: Names of those that have covariances.
        exact: Whether other short matrices have second moments too, as vectors have.
    """

    def __init__(self, units: Sequence[Unit], sided: Container[str], exact: bool) -> None:
        self.units, stop = list[Unit](), 0
        for u in units:
            self.units.append(replace(u, start=stop, stop=(stop := stop + u.stop - u.start)))
        self._total = torch.zeros(stop, dtype=torch.float64)
        self._moments = {
            u.name: _empty_moment(u.stop - u.start)
            for u in self.units
            if is_vector(describe_units([u])[0], sided, exact)
        }

    def buffer(self, size: int) -> Tensor:
        """Memory for the features of a pass of so many examples."""
        return torch.empty(size, len(self._total))

    def clear(self) -> None:
        for total in (self._total, *self._moments.values()):
            total.zero_()

    def add(self, features: Tensor) -> None:
        add_squares(self._total, features)
        for u in self.units:
            if u.name in self._moments:
                g = features[:, u.columns].to(self._moments[u.name])
                self._moments[u.name].addmm_(g.T, g)

    def means(self, u: Unit, count: int) -> tuple[Tensor, Tensor | None]:
        """Mean squares of the gradients of one of the `units`; of vectors along a basis, which comes transposed."""
        if u.name not in self._moments:
            return self._total[u.columns].div_(count), None
        values, basis = eigen(self._moments.pop(u.name).div_(count), u.name)
        return values.clamp(min=0), basis.T


def _finite_rows(features: Tensor) -> Tensor:
    """The features of examples whose gradients are finite."""
    if torch.linalg.vector_norm(features, dim=1).isfinite().all():
        return features
    return features[features.isfinite().all(1)]  # or they are too large to be squared


def _run_only(run: FeaturePass, rows: Rows, cut: Sequence[int]) -> None:
    for _ in run.over(rows.batches([cut])):
        pass


def _is_finite(run: FeaturePass, rows: Rows, cut: Sequence[int]) -> bool:
    """Whether the covariances of these examples are; they are forgotten."""
    _run_only(run, rows, cut)
    assert run.factors is not None
    parts = [part for pair in run.factors.sums.values() for part in pair if part is not None]
    finite = all(bool(part.isfinite().all()) for part in parts)
    for part in parts:
        part.zero_()
    return finite


def is_vector(unit: Mapping[str, Any], sized: Container[str], exact: bool) -> bool:
    """Whether a parameter gets the eigenvectors of its second moment."""
    short = unit["size"] <= EXACT
    return short and (len(unit["shape"]) < 2 or (exact and unit["name"] not in sized))


def eigen(moment: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; of large matrices in float32, whose orthogonality suffices."""
    if len(moment) <= _SINGLE or not moment.isfinite().all():
        return eigh(moment.double(), name)
    mean = moment.diagonal().double().mean()
    scaled = (moment / mean).float()
    try:
        values, vectors = torch.linalg.eigh((scaled + scaled.T) / 2)
    except torch.linalg.LinAlgError:
        return eigh(moment.double(), name)
    return values * mean, vectors


def add_squares(total: Tensor, features: Tensor) -> None:
    """total (D,) += sums of squares of features (n, D), a part at a time: squares of all would be as large."""
    for some, part in zip(total.split(_PART), features.split(_PART, 1)):
        some += part.square().sum(0).to(some.device)


def _empty_moment(n: int) -> Tensor:
    return torch.zeros(n, n, dtype=torch.float64 if n <= _SINGLE else torch.float32)
