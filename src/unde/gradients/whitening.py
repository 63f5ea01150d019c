"""Whitening of whole gradients for EKFAC: the bases Q, the eigenvalues Λ and the damping λ.

    feature of G = (Λ + λ)^−1/2 ⊙ (Q_leftᵀ G Q_right)          score = ⟨feature of the query, feature of the example⟩

One pass adds up the covariances of both sides of every matrix, whose eigenvectors are Q, and the squares of its
gradients. Λ is the outer product of the eigenvalues of both sides, as K-FAC has it, scaled to the sum of those squares.
`fit_eigenvalues` turns the gradients in a second pass and averages their squares, as EKFAC has it.

Biases and norms get the eigenvectors of their exact second moment. A side without a covariance (a vocabulary) keeps its
coordinates, Q = I ⊗ Q_right, with the sums of squares along it in place of eigenvalues.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unde.gradients.factors import factor_sizes, length
from unde.gradients.feature_pass import Measurement, choose_pass_size
from unde.gradients.hooks import restore_coverage
from unde.gradients.parameters import DAMPINGS, describe_units, make_units
from unde.gradients.statistics import Passes, Squares, Statistics, eigen, is_vector


def fit_whitening(
    data: Statistics,
    dampings: Callable[[Mapping[str, Tensor]], Mapping[str, float]],
    memory: int,
    passes: Passes | None = None,
    allocate: Callable[[int], Tensor] = torch.empty,
) -> tuple[dict[str, Tensor], Passes]:
    """The matrices of whitening, and examples and rows in a pass.

    Sums of as many parameters as half of the memory holds are computed together; where that is not all of them, the
    pass over the sample is repeated for the others.

    Args:
        data: Model, task and data.
        dampings: λ of each parameter from its eigenvalues, as the kernel has them.
        memory: The budget in bytes; a pass takes the other half.
        passes: Examples and rows in a pass, if they were decided before.
        allocate: An empty float32 vector of this length, which holds all matrices that are returned.

    Returns:
        "rows/<name>" and "cols/<name>", the transposed bases of each side; "values/<name>", Λ; and "dampings", λ.
    """
    plain = make_units(data.model, data.names, "none", 0)
    if passes is None:
        what = Measurement(plain, data.measures[0])
        coverage = restore_coverage(data.coverages[0], data.model, plain)
        passes = choose_pass_size(data.model, data.task, data.rows, what, coverage, memory)
    described = describe_units(plain)
    sizes, matrices = factor_sizes(described, "none"), _Matrices(allocate(count_matrices(described)))
    rounds = rounds_of_whitening(described, memory, passes[0])
    for i, names in enumerate(rounds):
        squares = Squares([u for u in plain if u.name in set(names)], sizes, exact=False)
        some = {name: sizes[name] for name in names if name in sizes}
        covariances = data.covariances(plain, passes, _title("covariances", i, len(rounds)), some, squares)
        for u in squares.units:
            spectra = _put_bases(covariances.pop(u.name, ()), u.name, matrices)
            values, basis = squares.means(u, data.count)
            if basis is not None:
                matrices.put(f"cols/{u.name}", basis)
            matrices.put(f"values/{u.name}", _outer(values, spectra, u.shape[0]) if spectra else values)
    return _damped(matrices, data.names, dampings), passes


def fit_eigenvalues(
    data: Statistics,
    dampings: Callable[[Mapping[str, Tensor]], Mapping[str, float]],
    memory: int,
    passes: Passes,
) -> dict[str, Tensor]:
    """As `fit_whitening`, with the Λ of EKFAC: mean squares along the bases, by another pass over the sample.

    Returns:
        The same matrices, and "whole/<name>", the transposed basis of a short matrix without sides.
    """
    plain = make_units(data.model, data.names, "none", 0)
    described = describe_units(plain)
    sizes, matrices = factor_sizes(described, "none"), _Matrices(torch.empty(count_matrices(described, True)))
    rounds = rounds_of_covariances(described, memory)
    for i, names in enumerate(rounds):
        some = {name: sizes[name] for name in names}
        covariances = data.covariances(plain, passes, _title("covariances", i, len(rounds)), some)
        for name in names:
            _put_bases(covariances.pop(name), name, matrices)
    units = make_units(data.model, data.names, "factored(1)", 0, matrices.named)
    sided = {name.partition("/")[2] for name in matrices.named}
    rounds = rounds_of_eigenvalues(described, memory, passes[0])
    for i, names in enumerate(rounds):
        squares = Squares([u for u in units if u.name in set(names)], sided, exact=True)
        for features in data.features(units, passes, _title("eigenvalues", i, len(rounds)), squares.units):
            squares.add(features)
        for u in squares.units:
            values, basis = squares.means(u, data.count)
            if basis is not None:
                matrices.put(f"{'cols' if len(u.shape) < 2 else 'whole'}/{u.name}", basis)
            matrices.put(f"values/{u.name}", values)
    return _damped(matrices, data.names, dampings)


def _put_bases(pair: Sequence[Tensor | None], name: str, matrices: _Matrices) -> list[Tensor | None]:
    """Add the bases of a matrix with these covariances; their eigenvalues. None where one of them is zero: the gradient
    went a general way."""
    if not all(c.any() for c in pair if c is not None):
        return []
    spectra = list[Tensor | None]()
    for side, c in zip(("rows", "cols"), pair):
        values, vectors = (None, None) if c is None else eigen(c.cpu(), name)
        spectra.append(None if values is None else values.double().clamp(min=0))
        if vectors is not None:
            matrices.put(f"{side}/{name}", vectors.T)
    return spectra


def _outer(squares: Tensor, spectra: Sequence[Tensor | None], rows: int) -> Tensor:
    """Λ of a matrix: the outer product of the eigenvalues of its sides, or of the squares along a side without them.

    Its sum is that of the mean squares of the entries.
    """
    matrix = squares.view(rows, -1)
    left, right = (matrix.sum(1 - i) if x is None else x for i, x in enumerate(spectra))
    taps = matrix.shape[1] // len(right)  # of a kernel whose basis is that of input channels
    product = left.outer(right.repeat_interleave(taps)).flatten()
    return product.mul_(matrix.sum() / product.sum()) if product.any() else product


def _damped(
    matrices: _Matrices,
    names: Sequence[str],
    dampings: Callable[[Mapping[str, Tensor]], Mapping[str, float]],
) -> dict[str, Tensor]:
    """The matrices, and λ of each parameter."""
    lam = dampings({name: matrices.named[f"values/{name}"] for name in names})
    return matrices.named | {DAMPINGS: torch.tensor([lam[name] for name in names], dtype=torch.float64)}


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


def count_matrices(units: Sequence[Mapping[str, Any]], exact: bool = False) -> int:
    """Numbers in the bases and eigenvalues of these parameters, at most."""
    vectors = sum(u["size"] ** 2 for u in units if is_vector(u, (), exact))
    return length(factor_sizes(units, "none")) + vectors + sum(u["size"] for u in units)


def whitening_memory(units: Sequence[Mapping[str, Any]]) -> int:
    """Bytes that whitening takes at least, one parameter at a time, beside the bases and Λ.

    A pass over one example holds its features, (Λ + λ)^−1/2, and the largest parameter three times.
    """
    sides = [n for pair in factor_sizes(units, "none").values() for n in pair if n is not None]
    vectors = [u["size"] for u in units if is_vector(u, (), exact=False)]
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


def rounds_of_eigenvalues(units: Sequence[Mapping[str, Any]], memory: int, pass_size: int) -> list[list[str]]:
    """Parameters whose eigenvalues are computed together."""
    sized = factor_sizes(units, "none")
    return _split({u["name"]: _bytes_of_squares(u, sized, pass_size, exact=True) for u in units}, memory // 2)


def rounds_of_whitening(units: Sequence[Mapping[str, Any]], memory: int, pass_size: int) -> list[list[str]]:
    """Parameters whose covariances and squares are added up together."""
    sized = factor_sizes(units, "none")
    each = {
        u["name"]: 4 * sum(n * n for n in sized.get(u["name"], ()) if n is not None)
        + _bytes_of_squares(u, sized, pass_size, exact=False)
        for u in units
    }
    return _split(each, memory // 2)


def _bytes_of_squares(unit: Mapping[str, Any], sized: Container[str], pass_size: int, exact: bool) -> int:
    """Sums, features of a pass, and the moment of a vector."""
    moment = 4 * unit["size"] ** 2 if is_vector(unit, sized, exact) else 0
    return (8 + 4 * pass_size) * unit["size"] + moment


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
