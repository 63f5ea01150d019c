"""Kernels of methods on gradients that are not stored, fitted to a sample of the data; queries as outer products.

EKFAC takes two passes over the sample (`unde.gradients.whitening`), the diagonal metric one; both are fitted to whole
gradients. That of LoGRA takes the features of the sample under any projection, which stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unde import console
from unde.checkpoints import load_checkpoint
from unde.data import Rows, evenly
from unde.devices import CPU, Compute, device_of, double_device, put
from unde.errors import UndeError
from unde.gradients.factors import factor_sizes
from unde.gradients.feature_pass import exclusive, set_rows
from unde.gradients.gauss_newton import GaussNewton
from unde.gradients.statistics import SAMPLE, Statistics, add_squares
from unde.gradients.whitening import fit_eigenvalues
from unde.index import projection_matrices
from unde.index.feature_runner import FeatureRunner
from unde.kernels import Diagonal, EKFACKernel, Gram, Identity, TensorSource
from unde.kernels.base import Fitted, Kernel, Moments, ParameterColumns, fit_kernel, put_moments
from unde.kernels.conjugate_gradients import conjugate_gradients
from unde.methods import Method
from unde.store.factored import MatrixShape, leading
from unde.store.manifest import Manifest

KERNELS = (Identity, Diagonal, EKFACKernel)  # that do not mix parameters
SAMPLE_SHARE = 4  # features of a sample take at most 1/4 of the memory budget
Kept = MutableMapping[tuple[str, int], Moments]  # by kernel and checkpoint: good for any damping
PROBES = 4  # random vectors that the trace of the Gauss-Newton matrix is estimated by
_APPLIED = 2**24  # bytes of features that K is applied to together, at least those of one query
_PRODUCTS = 2**24  # numbers between two products of outer products, at most, or those of one query


def is_by_layer(kernel: Kernel) -> bool:
    """Whether it is that of LoGRA, of the gradients that training examples have."""
    return isinstance(kernel, Gram) and (kernel.blocks, kernel.fisher) == ("layer", "empirical")


def split_memory(method: Method, m: Manifest, memory: int, there: Compute) -> int:
    """Bytes for passes, and for what they add up. On a device half of what K leaves: queries and products take the
    other half."""
    if there.device == CPU:
        return memory
    source = TensorSource(torch.empty(0, m.width, device="meta"), _parts(m), [slice(0, SAMPLE)])
    bound = method.kernel.bind(source.sizes)
    bound.check(there.memory, there.device)
    return min(memory, (there.memory - bound.needs().memory) // 2)


def fit_to_gradients(
    method: Method,
    runner: FeatureRunner,
    rows: Rows,
    c: int,
    memory: int,
    there: Compute,
    kept: Kept,
    usable: Tensor | None = None,
) -> Fitted:
    """K of a method under checkpoint c.

    Args:
        method: A method whose kernel is one of `KERNELS`, or that of LoGRA.
        runner: The model; its units are whole gradients, but for LoGRA.
        rows: The training data.
        c: The checkpoint.
        memory: The budget in bytes.
        there: Where K is applied.
        kept: Moments of earlier calls, to which those of this one are added.
        usable: Positions of the examples that LoGRA may be fitted to; all by default.
    """
    m, count = runner.manifest, min(len(rows), SAMPLE)
    if is_by_layer(method.kernel):
        features = _features_of_sample(method, runner, rows, c, memory, usable)
        source = TensorSource(put(features, there.device), _parts(m))
        method.kernel.bind(source.sizes).check(there.memory, there.device)
        return fit_kernel(method.kernel, source)
    source = TensorSource(torch.empty(0, m.width, device=there.device), _parts(m), [slice(0, count)])
    bound = method.kernel.bind(source.sizes)
    if isinstance(method.kernel, Identity):
        return bound.fit({}, source)
    bound.check(there.memory, there.device)
    if (bound.key, c) not in kept:
        runner.close()
        with exclusive(runner.inputs.model):
            data = projection_matrices.curvature_data(runner.inputs, rows, m.unit_names, method, [c])
            kept[bound.key, c] = _moments(method, runner, data, memory)
    return bound.fit(put_moments(kept[bound.key, c], source), source)


def _features_of_sample(
    method: Method, runner: FeatureRunner, rows: Rows, c: int, memory: int, usable: Tensor | None
) -> Tensor:
    """(n, D) features of examples spread over those that are usable."""
    usable = torch.arange(len(rows)) if usable is None else usable
    where = usable[evenly(len(usable), SAMPLE)].tolist()
    need = 4 * runner.manifest.width * len(where)
    if SAMPLE_SHARE * need > memory:
        raise UndeError(
            f"{type(method).__name__} under {method.projection} is fitted to the features of {len(where):,} examples, "
            f"{console.size(need)}, and a quarter of the memory budget of {console.size(memory)} is less: raise "
            "memory=, or take a smaller projection, scores.rescore(top, projection='kron(64)')"
        )
    return torch.cat([part["features"] for _, part in runner.passes(rows.subset(where), c, where)])


def _parts(m: Manifest) -> Sequence[ParameterColumns]:
    sides = factor_sizes(m.units, "none")
    return [ParameterColumns(name, at, sides.get(name)) for name, at in zip(m.unit_names, m.columns)]


def _moments(method: Method, runner: FeatureRunner, data: Statistics, memory: int) -> Moments:
    m = runner.manifest
    passes = m.resolved.pass_size, m.resolved.rows
    if isinstance(method.kernel, EKFACKernel):
        matrices = fit_eigenvalues(data, method.kernel.dampings, memory, passes)
        return _ekfac_moments(matrices, m)
    squares = torch.zeros(m.width, dtype=torch.float64, device=double_device(device_of(runner.inputs.model)))
    for features in data.features(runner.units, passes, "second moments"):
        add_squares(squares, features)
    return {"squares": squares}


def _ekfac_moments(matrices: Mapping[str, Tensor], m: Manifest) -> dict[str, Tensor]:
    """The matrices of whitening as the moments of EKFAC: eigenvectors in columns."""
    out: dict[str, Tensor] = {}
    for u in m.units:
        name = u["name"]
        out[f"values {name}"] = matrices[f"values/{name}"]
        right = "right" if len(u["shape"]) > 1 else "basis"
        for key, side in (("rows", "left"), ("cols", right), ("whole", "basis")):
            if f"{key}/{name}" in matrices:
                out[f"{side} {name}"] = matrices[f"{key}/{name}"].T
    return out


def apply_in_place(fitted: Fitted, features: Tensor) -> Tensor:
    """K applied to features (n, D), a few rows at a time, where K is."""
    for some in features.split(max(1, _APPLIED // (4 * features.shape[1]))):
        some.copy_(fitted.apply(put(some, fitted.source.device)))
    return features


# --- conjugate gradients ------------------------------------------------------------------------------------


def gradient_dampings(method: Method, runner: FeatureRunner, c: int, kept: Kept) -> Tensor:
    """(D,) λ of each entry, from what EKFAC was fitted to."""
    m, kernel = runner.manifest, method.kernel
    assert isinstance(kernel, EKFACKernel)
    [moments] = [kept[key] for key in kept if key[1] == c]
    lam = kernel.dampings({name: moments[f"values {name}"].cpu() for name in m.unit_names})
    return torch.cat([torch.full((x.stop - x.start,), lam[name]) for name, x in zip(m.unit_names, m.columns)])


def solve(
    method: Method,
    runner: FeatureRunner,
    rows: Rows,
    c: int,
    fitted: Fitted,
    dampings: Tensor,
    gradients: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """(G + λ)⁻¹ g for gradients (Q, D) under checkpoint c, and what is left of each.

    The trace of G differs from that of the second moments that λ is a multiple of (by the length of a text, for means
    over its tokens). Where λ is relative, G is scaled to that trace, which a few random vectors tell.
    """
    m, inputs = runner.manifest, runner.inputs
    kernel = method.kernel
    assert isinstance(kernel, EKFACKernel)
    task, dampings = set_rows(inputs.task, m.resolved.rows), dampings.to(gradients)
    with exclusive(inputs.model), load_checkpoint(inputs.model, inputs.checkpoints, c):
        curvature = GaussNewton(inputs.model, task, rows, runner.units, m.resolved.pass_size)
        scale = 1.0
        if kernel.relative:
            generator = torch.Generator().manual_seed(0)
            signs = torch.randint(2, (PROBES, m.width), generator=generator).to(gradients).mul_(2).sub_(1)
            trace = float((signs * curvature.times(signs, "trace of the Gauss-Newton matrix")).sum()) / PROBES
            scale = float(dampings.cpu().double().sum()) / kernel.damping / trace

        def multiply(vectors: Tensor, step: int) -> Tensor:
            product = curvature.times(vectors, f"conjugate gradients, step {step + 1} of {steps}")
            return product.mul_(scale).addcmul_(vectors, dampings)

        return conjugate_gradients(multiply, lambda r: apply_in_place(fitted, r.clone()), gradients, steps)


# --- queries as outer products ------------------------------------------------------------------------------


class _Part(NamedTuple):
    columns: slice  # of a gradient
    held: slice  # of what is held of a query
    sides: MatrixShape


@dataclass(frozen=True)
class QueryFactors:
    """Of each matrix of a preconditioned query the `rank` outer products that come closest; vectors are whole.

    Args:
        rank: How many; a matrix that they take no fewer numbers for is whole.
        units: The parameters, as a manifest lists them.
    """

    rank: int
    units: Sequence[Mapping[str, Any]]

    def parts(self) -> Iterator[_Part]:
        """The parameters in their order."""
        column = number = 0
        for u in self.units:
            size, rows = u["size"], u["shape"][0]
            sides = (rows, size // rows) if len(u["shape"]) > 1 else None
            if sides is not None and self.rank * sum(sides) >= size:
                sides = None
            each = size if sides is None else self.rank * sum(sides)
            yield _Part(slice(column, column + size), slice(number, number + each), sides)
            column, number = column + size, number + each

    @property
    def width(self) -> int:
        """Numbers that are held of a query."""
        return [part.held.stop for part in self.parts()][-1]

    def pack(self, queries: Tensor) -> Tensor:
        """(q, ·): what is held of queries (q, D)."""
        out = queries.new_empty(len(queries), self.width)
        for columns, held, sides in self.parts():
            x = queries[:, columns]
            if sides is not None:
                x = torch.cat(leading(x.unflatten(1, sides), self.rank), 1).mT.flatten(1)
            out[:, held] = x
        return out

    def error(self, queries: Tensor, held: Tensor, features: Tensor) -> Tensor:
        """(2,) sums of squares: of what scores of gradients (n, D) are off by, and of the scores."""
        exact = features @ queries.T
        found = self.products(held, features, [0] * len(self.units), features.new_zeros(1, *exact.shape))[0]
        return torch.stack([(found - exact).square().sum(), exact.square().sum()])

    def products(self, held: Tensor, features: Tensor, groups: Sequence[int], out: Tensor) -> Tensor:
        """Add the products of gradients (n, D) with what is held (Q, ·) to `out` (M, n, Q); one group a parameter."""
        for j, (columns, where, sides) in zip(groups, self.parts()):
            if sides is None:
                out[j].addmm_(features[:, columns], held[:, where].T)
                continue
            matrices = features[:, columns].unflatten(1, sides)
            step = max(1, _PRODUCTS // (self.rank * len(features) * sides[0]))
            for q in range(0, len(held), step):
                left, right = held[q : q + step, where].unflatten(1, (self.rank, -1)).split(list(sides), 2)
                along = matrices @ right.flatten(0, 1).T  # (n, R, q·k)
                each = (along * left.flatten(0, 1).T).sum(1)
                out[j][:, q : q + step] += each.unflatten(1, (-1, self.rank)).sum(2)
        return out
