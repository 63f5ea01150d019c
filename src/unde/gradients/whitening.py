"""Whitening of whole gradients for EKFAC: the bases Q, the eigenvalues Λ and the damping λ, from two passes.

    feature of G = (Λ + λ)^−1/2 ⊙ (Q_leftᵀ G Q_right)          score = ⟨feature of the query, feature of the example⟩

The first pass adds up the covariances of both sides of every matrix, whose eigenvectors are Q. The second turns the
gradients and averages their squares, which are Λ. Biases and norms get the eigenvectors of their exact second moment.
A side without a covariance (a vocabulary) keeps its coordinates: Q = I ⊗ Q_right.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unde import console
from unde.data import Rows, evenly
from unde.gradients.coverage import plan_coverage
from unde.gradients.factors import Factors, Sides, eigh, factor_sizes, length
from unde.gradients.feature_pass import FeaturePass, Measurement, choose_pass_size, set_rows, split_range
from unde.gradients.hooks import restore_coverage
from unde.gradients.parameters import DAMPINGS, Unit, describe_units, make_units
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
            if torch.linalg.vector_norm(result.features, dim=1).isfinite().all():
                yield result.features
            else:  # or too large to be squared
                yield result.features[result.features.isfinite().all(1)]

    def covariances(
        self, units: Sequence[Unit], passes: Passes, title: str, sizes: Mapping[str, Sides]
    ) -> Iterator[tuple[str, Sequence[Tensor | None]]]:
        """Each matrix with the covariances of its sides, those of short sides in float64.

        Where one is not finite, the examples that make it so are sought, and left out.
        """
        totals = self._add_up(units, passes, title, sizes, frozenset())
        if not all(t.isfinite().all() for pair in totals.values() for t in pair if t is not None):
            del totals
            totals = self._add_up(
                units, passes, title, sizes, self._bad_examples(units, passes, title, sizes)
            )
        while totals:
            name = next(iter(totals))
            yield name, totals.pop(name)

    def _add_up(
        self, units: Sequence[Unit], passes: Passes, title: str, sizes: Mapping[str, Sides], bad: Set[int]
    ) -> dict[str, list[Tensor | None]]:
        """Long sides are added up where they are, in the model's precision: there is one copy of them."""
        short = {
            name: [torch.zeros(n, n, dtype=torch.float64) if n and n <= _SINGLE else None for n in pair]
            for name, pair in sizes.items()
        }
        what, sums = Measurement(units, factors=sizes, emit=False), dict[str, tuple[Tensor | None, ...]]()
        for run, cut in self.runs(units, passes, title, what, bad):
            _run_only(run, self.rows, cut)
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


def fit_whitening(
    data: Statistics,
    dampings: Callable[[Mapping[str, Tensor]], Mapping[str, float]],
    memory: int,
    passes: Passes | None = None,
    exact: bool = False,
    allocate: Callable[[int], Tensor] = torch.empty,
) -> tuple[dict[str, Tensor], Passes]:
    """The matrices of whitening, and examples and rows in a pass.

    Covariances and eigenvalues of as many parameters as half of the memory holds are computed together; where that is
    not all of them, the passes over the sample are repeated for the others.

    Args:
        data: Model, task and data.
        dampings: λ of each parameter from its eigenvalues, as the kernel has them.
        memory: The budget in bytes; a pass takes the other half.
        passes: Examples and rows in a pass, if they were decided before.
        exact: Whether small matrices that have no covariances get eigenvectors too, which are those of vectors.
        allocate: An empty float32 vector of this length, which holds all matrices that are returned.

    Returns:
        "rows/<name>" and "cols/<name>", the transposed bases of each side; "values/<name>", Λ; and "dampings", λ. With
        `exact`, "whole/<name>" is the transposed basis of a matrix without sides.
    """
    plain = make_units(data.model, data.names, "none", 0)
    if passes is None:
        what = Measurement(plain, data.measures[0])
        coverage = restore_coverage(data.coverages[0], data.model, plain)
        passes = choose_pass_size(data.model, data.task, data.rows, what, coverage, memory)
    sizes, described = factor_sizes(describe_units(plain), "none"), describe_units(plain)
    matrices = _Matrices(allocate(count_matrices(described, exact)))
    rounds = rounds_of_covariances(described, memory)
    for i, names in enumerate(rounds):
        some, title = {name: sizes[name] for name in names}, _title("covariances", i, len(rounds))
        for name, pair in data.covariances(plain, passes, title, some):
            if all(c.any() for c in pair if c is not None):
                for side, c in zip(("rows", "cols"), pair):
                    if c is not None:
                        matrices.put(f"{side}/{name}", _eigen(c.cpu(), name)[1].T)
    units = make_units(data.model, data.names, "factored(1)", 0, matrices.named)
    rounds = rounds_of_eigenvalues(described, memory, passes[0], exact)
    for i, names in enumerate(rounds):
        some = [u for u in units if u.name in set(names)]
        _fit_eigenvalues(data, units, some, passes, _title("eigenvalues", i, len(rounds)), matrices, exact)
    named = matrices.named
    lam = dampings({name: named[f"values/{name}"] for name in data.names})
    named[DAMPINGS] = torch.tensor([lam[name] for name in data.names], dtype=torch.float64)
    return named, passes


@dataclass
class _Matrices:
    """Matrices one after the other in a buffer."""

    buffer: Tensor
    named: dict[str, Tensor] = field(default_factory=dict)

    def put(self, name: str, matrix: Tensor) -> None:
        place, self.buffer = self.buffer[: matrix.numel()], self.buffer[matrix.numel() :]
        self.named[name] = place.view(matrix.shape).copy_(matrix)


def _title(what: str, i: int, rounds: int) -> str:
    return f"whitening: {what}" + (f", {i + 1} of {rounds}" if rounds > 1 else "")


def _is_vector(unit: Mapping[str, Any], sized: Container[str], exact: bool) -> bool:
    """Whether a parameter gets the eigenvectors of its second moment."""
    short = unit["size"] <= EXACT
    return short and (len(unit["shape"]) < 2 or (exact and unit["name"] not in sized))


def count_matrices(units: Sequence[Mapping[str, Any]], exact: bool = False) -> int:
    """Numbers in the bases and eigenvalues of these parameters, at most."""
    vectors = sum(u["size"] ** 2 for u in units if _is_vector(u, (), exact))
    return length(factor_sizes(units, "none")) + vectors + sum(u["size"] for u in units)


def whitening_memory(units: Sequence[Mapping[str, Any]]) -> int:
    """Bytes that whitening takes at least, one parameter at a time, beside the bases and Λ.

    A pass over one example holds its features, (Λ + λ)^−1/2, and the largest parameter three times.
    """
    sides = [n for pair in factor_sizes(units, "none").values() for n in pair if n is not None]
    vectors = [u["size"] for u in units if _is_vector(u, (), exact=False)]
    sizes = [u["size"] for u in units]
    squares = (
        12 * max([*sides, *vectors], default=0) ** 2
    )  # a covariance, its eigenvectors, and room to find them
    return max(squares, 8 * sum(sizes) + 12 * max(sizes))


def rounds_of_covariances(units: Sequence[Mapping[str, Any]], memory: int) -> list[list[str]]:
    """Parameters whose covariances are added up together."""
    sizes = factor_sizes(units, "none")
    each = {name: 4 * sum(n * n for n in pair if n is not None) for name, pair in sizes.items()}
    return _split(each, memory // 2)


def rounds_of_eigenvalues(
    units: Sequence[Mapping[str, Any]], memory: int, pass_size: int, exact: bool = False
) -> list[list[str]]:
    """Parameters whose eigenvalues are computed together: sums, features of a pass, and moments of vectors."""
    sized = factor_sizes(units, "none")
    each = {
        u["name"]: (8 + 4 * pass_size) * u["size"]
        + (4 * u["size"] ** 2 if _is_vector(u, sized, exact) else 0)
        for u in units
    }
    return _split(each, memory // 2)


def _split(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Neighbours whose sizes add up to `most`, at least one of them.

    >>> _split({"a": 2, "b": 2, "c": 9, "d": 1}, 4)
    [['a', 'b'], ['c'], ['d']]
    """
    out, total = list[list[str]](), 0
    for name, size in sizes.items():
        if not out or total + size > most:
            out.append([])
            total = 0
        out[-1].append(name)
        total += size
    return out


def _eigen(moment: Tensor, name: str) -> tuple[Tensor, Tensor]:
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


def _fit_eigenvalues(
    data: Statistics,
    units: Sequence[Unit],
    some: Sequence[Unit],
    passes: Passes,
    title: str,
    matrices: _Matrices,
    exact: bool,
) -> None:
    """Add Λ of some units, mean squares of turned gradients, and the bases of short vectors."""
    columns, stop = list[Unit](), 0
    for u in some:
        columns.append(replace(u, start=stop, stop=(stop := stop + u.stop - u.start)))
    sided = {name.partition("/")[2] for name in matrices.named if name.startswith(("rows/", "cols/"))}
    vectors = [u for u in columns if _is_vector(describe_units([u])[0], sided, exact)]
    squares = torch.zeros(stop, dtype=torch.float64)
    moments = {u.name: _empty_moment(u.stop - u.start) for u in vectors}
    for features in data.features(units, passes, title, columns):
        add_squares(squares, features)
        for u in vectors:
            g = features[:, u.columns].to(moments[u.name])
            moments[u.name].addmm_(g.T, g)
    count = min(len(data.rows), SAMPLE) * len(data.checkpoints)  # labels of one example are one expectation
    for u in columns:
        values = squares[u.columns].div_(count)
        if u.name in moments:
            values, basis = _eigen(moments.pop(u.name).div_(count), u.name)
            matrices.put(f"{'cols' if len(u.shape) < 2 else 'whole'}/{u.name}", basis.T)
            values = values.clamp(min=0)
        matrices.put(f"values/{u.name}", values)


def add_squares(total: Tensor, features: Tensor) -> None:
    """total (D,) += sums of squares of features (n, D), a part at a time: squares of all would be as large."""
    for some, part in zip(total.split(_PART), features.split(_PART, 1)):
        some += part.square().sum(0).to(some.device)


def _empty_moment(n: int) -> Tensor:
    return torch.zeros(n, n, dtype=torch.float64 if n <= _SINGLE else torch.float32)
