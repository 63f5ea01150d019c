"""The EKFAC kernel against explicit matrices: Kronecker bases, corrected eigenvalues, damping, and what fails."""

from typing import NamedTuple

import pytest
import torch

from unde import UndeError
from unde.kernels import EKFACKernel, Gram, TensorSource
from unde.kernels import ParameterColumns as Columns
from unde.kernels import ekfac as module
from unde.kernels.base import compute_moments

F64 = torch.float64
GIB = 2**30


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class ParameterColumns(NamedTuple):
    """A parameter with the covariances of its two sides."""

    name: str
    columns: slice
    factors: tuple | None = None


def source(phi, parts, sizes=()):
    cuts = [0, *sizes, len(phi)]
    sides = {p.name: p.factors for p in parts if p.factors is not None}
    columns = [Columns(p.name, p.columns, p.factors and tuple(map(len, p.factors))) for p in parts]
    return TensorSource(phi, columns, [slice(a, b) for a, b in zip(cuts, cuts[1:])], sides)


def applied(kernel, phi, parts, sizes=(), fit=None):
    at = source(phi if fit is None else fit, parts, sizes)
    bound = kernel.bind(at.sizes)
    bound.check(GIB)
    fitted = bound.fit(compute_moments(bound, at), at)
    if fit is None:
        rows = torch.cat([fitted.train([s]) for s in range(len(at.sizes.cuts))])
        torch.testing.assert_close(fitted.apply(phi), rows)
    return fitted.apply(phi)


def tokens(n, t, r, c, seed=0):
    """Correlated left (n, t, r) and right (n, t, c) factors, the features they make, and their covariances."""
    left = draw(n, t, r, seed=seed) @ draw(r, r, seed=seed + 1)
    right = draw(n, t, c, seed=seed + 2) @ draw(c, c, seed=seed + 3)
    phi = torch.einsum("ntr,ntc->nrc", left, right).flatten(1)
    return phi, (left.flatten(0, 1).T @ left.flatten(0, 1), right.flatten(0, 1).T @ right.flatten(0, 1))


def explicit(phi, factors, damping, relative=True):
    """Φ Q (Λ + λ)⁻¹ Qᵀ with Q = Q_left ⊗ Q_right written out, by NumPy's eigh."""
    import numpy as np

    q = np.kron(*(np.linalg.eigh(f.numpy())[1] for f in factors))
    lam = ((phi.numpy() @ q) ** 2).mean(0)
    damping = damping * lam.mean() if relative else damping
    return torch.from_numpy(phi.numpy() @ q @ np.diag(1 / (lam + damping)) @ q.T)


@pytest.mark.parametrize("sizes", [(), (3,), (1, 7, 8)])
@pytest.mark.parametrize(("damping", "relative"), [(0.1, True), (10.0, True), (0.5, False)])
def test_equals_the_matrices_written_out(sizes, damping, relative):
    phi, factors = tokens(12, 5, 3, 4)
    got = applied(EKFACKernel(damping, relative), phi, [ParameterColumns("w", slice(0, 12), factors)], sizes)
    torch.testing.assert_close(got, explicit(phi, factors, damping, relative), rtol=1e-9, atol=1e-12)


def test_parameters_are_damped_one_by_one():
    a, fa = tokens(12, 5, 3, 4)
    b, fb = tokens(12, 5, 2, 3, seed=9)
    b = 1000 * b
    parts = [ParameterColumns("a", slice(0, 12), fa), ParameterColumns("b", slice(12, 18), fb)]
    got = applied(EKFACKernel(0.1), torch.cat([a, b], 1), parts)
    both = torch.cat([explicit(a, fa, 0.1), explicit(b, fb, 0.1)], 1)
    torch.testing.assert_close(got, both, rtol=1e-9, atol=1e-12)


def test_full_factorial_design_is_the_dense_damped_fisher():
    """Every input with every output gradient: the Fisher matrix is exactly A ⊗ G, and EKFAC exactly its inverse."""
    left, right = draw(7, 3) @ draw(3, 3, seed=1), draw(9, 4, seed=2) @ draw(4, 4, seed=3)
    phi = torch.einsum("ir,jc->ijrc", left, right).reshape(63, 12)
    factors = (9 * left.T @ left, 7 * right.T @ right)
    fisher = phi.T @ phi / len(phi)
    damping = 0.1 * float(fisher.diagonal().mean())
    dense = phi @ torch.linalg.inv(fisher + damping * torch.eye(12, dtype=F64))
    got = applied(EKFACKernel(0.1), phi, [ParameterColumns("w", slice(0, 12), factors)])
    torch.testing.assert_close(got, dense, rtol=1e-8, atol=1e-10)


def test_the_eigenvalues_are_corrected():
    """Positions of one example that are correlated: the products of eigenvalues (K-FAC) would be wrong."""
    phi, factors = tokens(12, 5, 3, 4)
    n = 12 * 5
    kfac = torch.kron(factors[0] / n, factors[1] / n)
    kfac = phi @ torch.linalg.inv(kfac + 0.1 * kfac.diagonal().mean() * torch.eye(12, dtype=F64))
    got = applied(EKFACKernel(0.1), phi, [ParameterColumns("w", slice(0, 12), factors)])
    assert (got / got.norm() - kfac / kfac.norm()).norm() > 0.1


def test_without_factors_the_second_moment_is_exact_or_diagonal(monkeypatch):
    phi = draw(20, 6) @ draw(6, 6, seed=4)
    parts = [ParameterColumns("bias", slice(0, 6))]
    moment = phi.T @ phi / 20
    damping = 0.1 * float(moment.diagonal().mean())
    exact = phi @ torch.linalg.inv(moment + damping * torch.eye(6, dtype=F64))
    torch.testing.assert_close(applied(EKFACKernel(0.1), phi, parts, (5,)), exact, rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(module, "EXACT", 5)
    diagonal = phi / (moment.diagonal() + damping)
    torch.testing.assert_close(applied(EKFACKernel(0.1), phi, parts, (5,)), diagonal, rtol=1e-9, atol=1e-12)


def test_fitted_on_other_features():
    phi, factors = tokens(12, 5, 3, 4)
    other, _ = tokens(30, 5, 3, 4, seed=20)
    parts = [ParameterColumns("w", slice(0, 12), factors)]
    import numpy as np

    q = torch.from_numpy(np.kron(*(np.linalg.eigh(f.numpy())[1] for f in factors)))
    lam = (other @ q).square().mean(0)
    want = phi @ q @ torch.diag(1 / (lam + 0.1 * lam.mean())) @ q.T
    torch.testing.assert_close(applied(EKFACKernel(0.1), phi, parts, fit=other), want, rtol=1e-9, atol=1e-12)


def test_float32_features_and_parameters_without_gradient():
    phi, factors = tokens(12, 5, 3, 4)
    got = applied(EKFACKernel(0.1), phi.float(), [ParameterColumns("w", slice(0, 12), factors)])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), explicit(phi, factors, 0.1), rtol=1e-4, atol=1e-5)
    phi = torch.cat([phi, torch.zeros(12, 5, dtype=F64)], 1)
    got = applied(
        EKFACKernel(0.1),
        phi,
        [ParameterColumns("w", slice(0, 12), factors), ParameterColumns("dead", slice(12, 17))],
    )
    assert not got[:, 12:].any()
    assert got.isfinite().all()


def test_rank_deficiency_and_nan_are_named():
    phi = draw(3, 6)
    with pytest.raises(UndeError, match=r"'layer.bias' is rank-deficient: 3 of its 6 .*Raise the damping"):
        applied(EKFACKernel(0.0), phi, [ParameterColumns("layer.bias", slice(0, 6))])
    applied(EKFACKernel(1e-6), phi, [ParameterColumns("layer.bias", slice(0, 6))])
    phi, (left, right) = tokens(12, 5, 3, 4)
    bad = right.clone()
    bad[1, 2] = torch.nan
    with pytest.raises(UndeError, match=r"covariance of parameter 'h.weight' holds NaN.*on_bad='skip'"):
        applied(EKFACKernel(0.1), phi, [ParameterColumns("h.weight", slice(0, 12), (left, bad))])
    phi[3, 3] = torch.inf
    with pytest.raises(UndeError, match=r"second moments of parameter 'h.weight' are NaN or infinite"):
        applied(EKFACKernel(0.1), phi, [ParameterColumns("h.weight", slice(0, 12), (left, right))])


def test_eigh_failures_fall_back_and_are_named(monkeypatch):
    phi, factors = tokens(12, 5, 3, 4)
    parts = [ParameterColumns("w", slice(0, 12), factors)]
    want = applied(EKFACKernel(0.1), phi, parts)

    def fails(*_args, **_kwargs):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    torch.testing.assert_close(applied(EKFACKernel(0.1), phi, parts), want, rtol=1e-8, atol=1e-10)
    monkeypatch.setattr(torch.linalg, "svd", fails)
    with pytest.raises(UndeError, match=r"no eigenvectors.*parameter 'w' \(did not converge\)"):
        applied(EKFACKernel(0.1), phi, parts)


def test_memory_budget():
    phi, factors = tokens(12, 5, 3, 4)
    with pytest.raises(UndeError, match=r"eigenvectors of 1 parameters need .* raise memory="):
        EKFACKernel(0.1).bind(source(phi, [ParameterColumns("w", slice(0, 12), factors)]).sizes).check(100)


@pytest.mark.parametrize("relative", [True, False])
def test_gram_of_each_layer(relative):
    """Weight and bias of a layer share a block; blocks of other layers are damped on their own."""
    phi = draw(30, 9) @ draw(9, 9, seed=5)
    phi[:, 6:] *= 100
    names = [("a.weight", 0, 3), ("b.weight", 3, 5), ("a.bias", 5, 6), ("c.weight", 6, 9)]
    parts = [ParameterColumns(n, slice(a, b)) for n, a, b in names]
    got = applied(Gram(0.1, relative, blocks="layer"), phi, parts, (4, 20))
    want = torch.empty_like(phi)
    for columns in ([0, 1, 2, 5], [3, 4], [6, 7, 8]):
        part = phi[:, columns]
        gram = part.T @ part
        lam = 0.1 * float(gram.diagonal().mean()) if relative else 0.1
        want[:, columns] = part @ torch.linalg.inv(gram + lam * torch.eye(len(columns), dtype=F64))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_gram_of_a_dead_layer_is_zero_and_a_singular_one_named():
    phi = torch.cat([draw(4, 6), torch.zeros(4, 2, dtype=F64)], 1)
    parts = [ParameterColumns("a.weight", slice(0, 6)), ParameterColumns("b.weight", slice(6, 8))]
    assert not applied(Gram(0.1, blocks="layer"), phi, parts)[:, 6:].any()
    with pytest.raises(UndeError, match=r"layer 'a': .* is singular"):
        applied(Gram(0.0, blocks="layer"), phi, parts)
    with pytest.raises(UndeError, match="all features of the index are zero"):
        applied(Gram(0.1, blocks="layer"), torch.zeros(4, 8, dtype=F64), parts)


def test_gram_of_layers_in_float32_with_a_large_common_direction():
    phi = (draw(200, 8) + 1e4).float()
    parts = [ParameterColumns("a.weight", slice(0, 8))]
    got = applied(Gram(1.0, relative=False, blocks="layer"), phi, parts)
    exact = phi.double() @ torch.linalg.inv(phi.double().T @ phi.double() + torch.eye(8, dtype=F64))
    assert (got.double() - exact).norm() < 1e-3 * exact.norm()
