"""The Gram kernel against an explicit inverse, in every form, precision and cut."""

import itertools

import pytest
import torch

from unde import UndeError
from unde.kernels import Gram, Part
from unde.kernels import gram as gram_module

pytestmark = pytest.mark.usefixtures("one_thread")

GIB = 2**30


def features(n, d, seed=0, dtype=torch.float64):
    """Rows of unequal size around a common direction, as gradients have."""
    g = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, d, generator=g, dtype=torch.float64) * torch.rand(
        n, 1, generator=g, dtype=torch.float64
    )
    return (phi + 0.1 * torch.randn(d, generator=g, dtype=torch.float64)).to(dtype)


def blocks(phi, sizes=None):
    cuts = list(itertools.accumulate(sizes or [len(phi)], initial=0))
    assert cuts[-1] == len(phi)
    return [(slice(a, b), lambda a=a, b=b: phi[a:b]) for a, b in itertools.pairwise(cuts)]


def applied(kernel, phi, sizes=None, memory=GIB):
    parts = list(kernel.apply(blocks(phi, sizes), [Part("w", slice(0, phi.shape[1]))], memory))
    assert [rows for rows, _ in parts] == [rows for rows, _ in blocks(phi, sizes)]
    return torch.cat([part for _, part in parts])


def explicit(phi, lam):
    """Φ (ΦᵀΦ + λI)⁻¹, as the equation is written, in float64."""
    phi = phi.double()
    return phi @ torch.linalg.inv(phi.T @ phi + lam * torch.eye(phi.shape[1], dtype=torch.float64))


@pytest.mark.parametrize(("n", "d"), [(30, 8), (8, 30), (12, 12), (1, 5), (5, 1)])
@pytest.mark.parametrize("form", ["primal", "dual", "auto"])
@pytest.mark.parametrize("lam", [1e-3, 1.0, 100.0])
def test_every_form_is_the_explicit_inverse(n, d, form, lam):
    phi = features(n, d)
    got = applied(Gram(lam, relative=False, form=form), phi)
    torch.testing.assert_close(got, explicit(phi, lam), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("n", "d"), [(30, 8), (8, 30)])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_relative_damping_is_a_multiple_of_the_mean_diagonal(n, d, form):
    """The diagonal of ΦᵀΦ, D long, also where the dual form never makes it."""
    phi = features(n, d)
    lam = 0.3 * float((phi.T @ phi).diagonal().mean())
    torch.testing.assert_close(applied(Gram(0.3, form=form), phi), explicit(phi, lam), rtol=1e-9, atol=1e-12)


def test_relative_damping_knows_no_units():
    phi = features(30, 8)
    torch.testing.assert_close(applied(Gram(0.1), 1000 * phi), applied(Gram(0.1), phi) / 1000)


def test_no_damping_is_the_pseudo_inverse():
    phi = features(30, 8)
    for form in ("primal", "auto"):
        got = applied(Gram(0.0, form=form), phi)
        torch.testing.assert_close(got, torch.linalg.pinv(phi).T, rtol=1e-8, atol=1e-10)
    wide = features(8, 30)
    torch.testing.assert_close(applied(Gram(0.0), wide), torch.linalg.pinv(wide).T, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("sizes", [[24], [1] * 24, [23, 1], [7, 7, 7, 3], [5, 19]])
@pytest.mark.parametrize("spare", [0, 1000, GIB])
def test_cuts_and_budgets_do_not_matter(form, sizes, spare):
    phi = features(24, 10)
    least = 2 * 8 * {"primal": 10, "dual": 24}[form] ** 2
    got = applied(Gram(0.5, form=form), phi, sizes, memory=least + spare)
    lam = 0.5 * float((phi.T @ phi).diagonal().mean())
    torch.testing.assert_close(got, explicit(phi, lam), rtol=1e-9, atol=1e-12)


def test_a_larger_budget_reads_less():
    """The dual form passes over Φ once for each part of the output that fits."""
    phi, reads = features(40, 100), 0

    def read(a):
        nonlocal reads
        reads += 1
        return phi[a : a + 4]

    counted = [(slice(a, a + 4), lambda a=a: read(a)) for a in range(0, 40, 4)]
    kernel, counts = Gram(0.1, form="dual"), []
    for memory in (2 * 8 * 40**2, 2 * 8 * 40**2 + 16 * 100 * 20, GIB):
        reads = 0
        list(kernel.apply(counted, [Part("w", slice(0, 100))], memory))
        counts.append(reads)
    assert counts[0] > counts[1] > counts[2]
    assert counts[2] == 1 + 10 + 10 + 10  # a first look, rows, columns, output


@pytest.mark.parametrize(("n", "d"), [(200, 40), (40, 200)])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_float32_features(n, d, form):
    phi = features(n, d, dtype=torch.float32)
    got = applied(Gram(0.1, form=form), phi, [n // 2, n - n // 2])
    assert got.dtype == torch.float32
    want = explicit(phi, 0.1 * float((phi.double() ** 2).sum()) / d)
    bound = 2e-6 if (form == "primal") == (d <= n) else 5e-5  # the smaller form is also the more exact one
    assert ((got - want).norm(dim=1) <= bound * want.norm(dim=1)).all()


def test_small_damping_beside_a_large_common_direction():
    """K φ is small along a direction that all gradients share: float32 products alone would lose it."""
    g = torch.Generator().manual_seed(0)
    phi = 0.05 * torch.randn(300, 40, generator=g) + 30 * torch.randn(40, generator=g)
    want = explicit(phi, 1e-2)
    along = torch.nn.functional.normalize(phi.double().mean(0), dim=0)
    for form in ("primal", "dual"):
        got = applied(Gram(1e-2, relative=False, form=form), phi).double()
        error = ((got - want) @ along).abs().max() / (want @ along).abs().max()
        assert error < 1e-3


def test_which_form_is_smaller(monkeypatch):
    made = []
    for name in ("_gram_primal", "_gram_dual"):
        real = getattr(gram_module, name)
        monkeypatch.setattr(gram_module, name, lambda *a, n=name, real=real: (made.append(n), real(*a))[1])
    applied(Gram(0.1), features(30, 8))
    applied(Gram(0.1), features(8, 30))
    assert made == ["_gram_primal", "_gram_dual"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("seed", range(8))
def test_a_singular_kernel_is_refused(dtype, form, seed):
    """One column too many and no damping: rounding makes a small positive number of zero half the time."""
    phi = features(14, 15, seed) if form == "primal" else features(15, 14, seed)
    with pytest.raises(UndeError, match=r"singular at λ = 0 .*raise the damping"):
        applied(Gram(0.0, form=form), phi.to(dtype))
    applied(Gram(1e-3, form=form), phi.to(dtype))


def test_units_of_other_sizes_are_not_taken_for_singular():
    """Features of one unit may be ten million times smaller than those of another."""
    phi = features(60, 8)
    phi[:, 4:] *= 1e-7
    got = applied(Gram(0.0), phi.float())
    want = torch.linalg.pinv(phi.float().double()).T
    assert ((got - want).norm(dim=0) <= 1e-3 * want.norm(dim=0)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_features_that_are_not_finite(bad, form):
    phi = features(20, 6)
    phi[11, 2] = bad
    with pytest.raises(UndeError, match=r"NaN or infinite entries.*on_bad='skip'"):
        applied(Gram(0.1, form=form), phi)


def test_features_of_zeros():
    with pytest.raises(UndeError, match="all features of the index are zero"):
        applied(Gram(0.1), torch.zeros(20, 6))


@pytest.mark.parametrize(
    ("form", "n", "d", "said"),
    [
        ("primal", 20, 1000, r"D × D kernel \(1,000 × 1,000\) needs 0\.0149 GiB.*budget is 0\.00931 GiB"),
        ("dual", 1000, 20, r"N × N kernel \(1,000 × 1,000\) needs 0\.0149 GiB"),
    ],
)
def test_the_memory_budget(form, n, d, said):
    phi = torch.ones(n, d)
    with pytest.raises(UndeError, match=said):
        applied(Gram(0.1, form=form), phi, memory=10**7)
    list(Gram(0.1).apply(blocks(phi), [Part("w", slice(0, d))], 10**7))  # the other form is small


def test_the_memory_that_is_used():
    """No more than two matrices of float64 at any time, as the budget says. In bytes that torch asks for."""
    d, phi = 300, features(400, 300, dtype=torch.float32)
    with torch.profiler.profile(profile_memory=True) as profile:
        list(Gram(0.1, form="primal").apply(blocks(phi), [Part("w", slice(0, d))], GIB))
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 8 * d * d < most < 2.2 * 8 * d * d + 4 * phi.numel()


def test_a_column_of_zeros_without_damping_is_singular():
    phi = features(20, 6)
    phi[:, 3] = 0
    with pytest.raises(UndeError, match="singular"):
        applied(Gram(0.0), phi)
    assert torch.equal(applied(Gram(0.1), phi)[:, 3], torch.zeros(20, dtype=torch.float64))
