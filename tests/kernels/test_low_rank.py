"""K from leading singular vectors: the dense inverse where they are all there, a known error where they are not."""

import pytest
import torch

from unde import UndeError
from unde.kernels import Gram, ParameterColumns, TensorSource, fit_kernel
from unde.kernels.base import compute_moments
from unde.kernels.low_rank import LowRankGram


def source(phi, blocks=1):
    n, d = phi.shape
    cuts = [slice(n * i // blocks, n * (i + 1) // blocks) for i in range(blocks)]
    return TensorSource(
        phi,
        [ParameterColumns("a.weight", slice(0, d // 2)), ParameterColumns("b.weight", slice(d // 2, d))],
        cuts,
    )


def features(n, d, decay=1.0, seed=0, dtype=torch.float64):
    """With singular values 10, 10·decay, 10·decay², …"""
    g = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(k, min(n, d), generator=g).double()).Q for k in (n, d))
    return (10 * left * decay ** torch.arange(min(n, d)) @ right.mT).to(dtype)


def dense(phi, damping, relative=True):
    """(ΦᵀΦ + λI)⁻¹ in float64, and λ."""
    gram = phi.double().T @ phi.double()
    lam = damping * float(gram.diagonal().mean()) if relative else damping
    return torch.linalg.inv(gram + lam * torch.eye(len(gram)).double()), lam


def matrix(kernel, phi, blocks=1):
    """K, column by column."""
    return fit_kernel(kernel, source(phi, blocks)).apply(torch.eye(phi.shape[1], dtype=phi.dtype))


@pytest.mark.parametrize(("n", "d"), [(60, 20), (20, 60), (30, 30)])
@pytest.mark.parametrize("decay", [1.0, 0.7])
@pytest.mark.parametrize("relative", [True, False])
def test_all_singular_vectors_give_the_inverse(n, d, decay, relative):
    phi = features(n, d, decay)
    for rank in (min(n, d), 10**6):
        got = matrix(Gram(0.1, relative, f"svd({rank})"), phi)
        want, _ = dense(phi, 0.1, relative)
        assert ((got - want).norm() <= 1e-9 * want.norm()).all()


def filled(phi, rank):
    """ΦᵀΦ with the mean of its other eigenvalues in their place, and these, by a dense decomposition."""
    values, vectors = torch.linalg.eigh(phi.T @ phi)
    others = min(phi.shape) - rank
    left = values.flip(0)[rank : rank + others]
    kept = vectors[:, -rank:]
    rest = torch.eye(phi.shape[1]).double() - kept @ kept.T
    return (kept * values[-rank:]) @ kept.T + left.mean() * rest, left


@pytest.mark.parametrize("rank", [1, 5, 12])
@pytest.mark.parametrize("decay", [0.5, 0.8])
@pytest.mark.parametrize(("n", "d"), [(50, 40), (40, 50)])
def test_some_of_them_give_the_inverse_with_a_mean_for_the_others(rank, decay, n, d):
    """What that misses is known from the other eigenvalues, in the space of the features."""
    phi = features(n, d, decay)
    truth, lam = dense(phi, 0.1)
    gram, left = filled(phi, rank)
    want = torch.linalg.inv(gram + lam * torch.eye(d).double())
    got = matrix(Gram(0.1, form=f"svd({rank})"), phi)
    assert (got - want).norm() <= 1e-3 * want.norm()
    missed = (1 / (left + lam) - 1 / (left.mean() + lam)).abs().max()
    along = torch.linalg.svd(phi, full_matrices=False).Vh
    off = float(torch.linalg.matrix_norm(along @ (got - truth) @ along.T, 2))
    assert off == pytest.approx(float(missed), rel=0.02)


def test_close_singular_values_take_more_directions_than_are_kept():
    """Without a gap the vectors are not determined, but K is as good as with those of an exact decomposition."""
    phi = torch.randn(300, 200, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    truth, lam = dense(phi, 0.1)
    best = torch.linalg.inv(filled(phi, 80)[0] + lam * torch.eye(200).double())
    got = matrix(Gram(0.1, form="svd(80)"), phi)
    assert (best - truth).norm() < (got - truth).norm() <= 1.02 * (best - truth).norm()


def test_k_is_symmetric_and_neither_n_nor_d_squared_is_made():
    phi = features(400, 900, 0.97, dtype=torch.float32)
    bound = Gram(0.1, form="svd(30)").bind(source(phi).sizes)
    assert isinstance(bound, LowRankGram)
    moments = compute_moments(bound, source(phi))
    assert max(t.numel() for t in moments.values()) == 900 * (30 + 16)
    assert {name: tuple(t.shape) for name, t in moments.items()} == {
        name: tuple(t.shape) for name, t in bound.needs().moments.items()
    }
    k = bound.fit(moments, source(phi)).apply(torch.eye(900))
    assert (k - k.T).norm() <= 1e-5 * k.norm()


def test_blocks_and_jobs_change_nothing_but_rounding(monkeypatch):
    phi = features(120, 50, 0.8)
    one = matrix(Gram(0.1, form="svd(10)"), phi)
    monkeypatch.setattr("unde.kernels.base.JOINED", 1)
    sizes = source(phi, 20).sizes
    assert [len(sizes.runs()), Gram(0.1, form="svd(10)").bind(sizes).rounds[0].jobs] == [16, 16]
    assert (matrix(Gram(0.1, form="svd(10)"), phi, 20) - one).norm() <= 1e-9 * one.norm()


def test_another_damping_needs_no_other_moments():
    phi = features(60, 30, 0.8)
    keys = {Gram(damping, form="svd(8)").bind(source(phi).sizes).key for damping in (0.1, 1.0, 0.01)}
    assert len(keys) == 1
    bound = [Gram(damping, form="svd(30)").bind(source(phi).sizes) for damping in (0.1, 1.0)]
    moments = compute_moments(bound[0], source(phi))
    got = bound[1].fit(moments, source(phi)).apply(torch.eye(30, dtype=torch.float64))
    assert (got - dense(phi, 1.0)[0]).norm() <= 1e-9


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_the_size_of_features_does_not_matter(scale):
    """Φ K Φᵀ has no unit."""
    phi = features(40, 200, 0.9, dtype=torch.float32)
    got = phi @ fit_kernel(Gram(0.1, form="svd(40)"), source(phi * scale)).apply(phi * scale).T * scale
    want = phi.double() @ dense(phi, 0.1)[0] @ phi.double().T
    assert (got - want).norm() <= 1e-4 * want.norm()


def test_float32_features_under_little_damping():
    """s²/λ is a million here: differences of that size are taken in float64."""
    phi = features(80, 60, 0.8, dtype=torch.float32)
    got = matrix(Gram(1e-6, form="svd(60)"), phi)
    want, lam = dense(phi, 1e-6)
    assert float((phi.double() @ (got - want)).norm() / (phi.double() @ want).norm()) < 1e-3
    assert lam < 1e-5


def test_what_is_refused():
    with pytest.raises(UndeError, match="all features of the index are zero"):
        matrix(Gram(0.1, form="svd(4)"), torch.zeros(20, 8))
    with pytest.raises(UndeError, match=r"without damping .* raise the damping, or use form='primal'"):
        matrix(Gram(0.0, form="svd(4)"), features(20, 8))
    with pytest.raises(UndeError, match=r"form 'svd\(0\)': expected at least one"):
        Gram(0.1, form="svd(0)").bind(source(features(20, 8)).sizes)
    bound = Gram(0.1, form="svd(256)").bind(source(torch.ones(2, 100_000)).sizes)
    bound.check(2**30)
    with pytest.raises(UndeError, match=r"kernel of 2 singular vectors \(100,000 × 18\) needs .*budget"):
        bound.check(2**20)
