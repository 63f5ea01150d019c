"""Kernels of methods on whole gradients, fitted to a sample of the training data: nothing is stored.

EKFAC takes two passes over the sample (`unde.gradients.whitening`), the diagonal metric one. K acts on the query side,
where the gradients of a few queries meet those of many training examples.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from unde.checkpoints import load_checkpoint
from unde.data import Rows
from unde.devices import CPU, Compute, device_of, double_device, put
from unde.gradients.factors import factor_sizes
from unde.gradients.feature_pass import exclusive, set_rows
from unde.gradients.gauss_newton import GaussNewton
from unde.gradients.whitening import SAMPLE, Statistics, add_squares, fit_whitening
from unde.index import projection_matrices
from unde.index.feature_runner import FeatureRunner
from unde.kernels import Diagonal, EKFACKernel, Identity, TensorSource
from unde.kernels.base import Fitted, Moments, ParameterColumns, put_moments
from unde.kernels.conjugate_gradients import conjugate_gradients
from unde.methods import Method
from unde.store.manifest import Manifest

KERNELS = (Identity, Diagonal, EKFACKernel)  # that do not mix parameters
Kept = MutableMapping[tuple[str, int], Moments]  # by kernel and checkpoint: good for any damping
PROBES = 4  # random vectors that the trace of the Gauss-Newton matrix is estimated by
_APPLIED = 2**24  # bytes of features that K is applied to together, at least those of one query


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
    kept: Kept | None = None,
) -> Fitted:
    """K of a method under checkpoint c.

    Args:
        method: A method whose kernel is one of `KERNELS`.
        runner: The model; its units are whole gradients.
        rows: The training data.
        c: The checkpoint.
        memory: The budget in bytes.
        there: Where K is applied.
        kept: Moments of earlier calls, to which those of this one are added.
    """
    m, count = runner.manifest, min(len(rows), SAMPLE)
    source = TensorSource(torch.empty(0, m.width, device=there.device), _parts(m), [slice(0, count)])
    bound = method.kernel.bind(source.sizes)
    if isinstance(method.kernel, Identity):
        return bound.fit({}, source)
    bound.check(there.memory, there.device)
    kept = {} if kept is None else kept
    if (bound.key, c) not in kept:
        runner.close()
        with exclusive(runner.inputs.model):
            data = projection_matrices.curvature_data(runner.inputs, rows, m.unit_names, method, [c])
            kept[bound.key, c] = _moments(method, runner, data, memory)
    return bound.fit(put_moments(kept[bound.key, c], source), source)


def _parts(m: Manifest) -> Sequence[ParameterColumns]:
    sides = factor_sizes(m.units, "none")
    return [ParameterColumns(name, at, sides.get(name)) for name, at in zip(m.unit_names, m.columns)]


def _moments(method: Method, runner: FeatureRunner, data: Statistics, memory: int) -> Moments:
    m = runner.manifest
    passes = m.resolved.pass_size, m.resolved.rows
    if isinstance(method.kernel, EKFACKernel):
        matrices, _ = fit_whitening(data, method.kernel.dampings, memory, passes, exact=True)
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
