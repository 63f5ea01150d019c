"""The Gram kernel against an explicit inverse, in every form, precision and cut."""

import itertools

import pytest
import torch

from unde import UndeError
from unde.kernels import Gram, ParameterColumns, TensorSource
from unde.kernels import base as base_module
from unde.kernels.base import compute_moments
from unde.kernels.trak import Dual, Primal

GIB = 2**30


def features(n, d, seed=0, dtype=torch.float64):
    """Rows of unequal size around a common direction, as gradients have."""
    g = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, d, generator=g, dtype=torch.float64) * torch.rand(
        n, 1, generator=g, dtype=torch.float64
    )
    return (phi + 0.1 * torch.randn(d, generator=g, dtype=torch.float64)).to(dtype)


def source(phi, sizes=None):
    cuts = list(itertools.accumulate(sizes or [len(phi)], initial=0))
    assert cuts[-1] == len(phi)
    return TensorSource(
        phi,
        [ParameterColumns("w", slice(0, phi.shape[1]))],
        [slice(a, b) for a, b in itertools.pairwise(cuts)],
    )


def applied(kernel, phi, sizes=None, memory=GIB):
    """K g(n) of the rows that the kernel is fitted to, in the blocks that they are stored in."""
    at = source(phi, sizes)
    bound = kernel.bind(at.sizes)
    bound.check(memory)
    fitted = bound.fit(compute_moments(bound, at), at)
    return torch.cat([fitted.train(blocks) for blocks in at.sizes.joined()])


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


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("joined", [2**26, 1])
def test_layers_wider_than_rows_are_inverted_in_the_dual_form(scope, joined, monkeypatch):
    """One layer of 30 columns in two pieces, one of 4, one without gradients: for the rows of Φ, and for others."""
    monkeypatch.setattr(base_module, "JOINED", joined)
    phi, others = features(12, 40), features(5, 40, seed=1)
    phi[:, 34:36] = 0
    places = {
        "a.weight": (0, 26),
        "b.weight": (26, 30),
        "a.bias": (30, 34),
        "c.weight": (34, 36),
        "d": (36, 40),
    }
    parts = [ParameterColumns(name, slice(*at)) for name, at in places.items()]
    at = TensorSource(phi, parts, [slice(0, 5), slice(5, 12)])
    bound = Gram(0.3, blocks="layer", damping_scope=scope).bind(at.sizes)
    assert max(t.shape[0] for t in bound.needs().moments.values()) == 12
    fitted = bound.fit(compute_moments(bound, at), at)
    layers = [[*range(26), *range(30, 34)], [*range(26, 30)], [*range(36, 40)]]
    want = torch.zeros(2, 12, 40, dtype=torch.float64)
    for rows, out in ((phi, want[0]), (others, want[1])):
        for c in layers:
            gram = phi[:, c].T @ phi[:, c]
            unit = gram.diagonal().mean() if scope == "layer" else (phi**2).sum(0).mean()
            out[: len(rows), c] = rows[:, c] @ torch.linalg.inv(
                gram + 0.3 * unit * torch.eye(len(c), dtype=torch.float64)
            )
    got = torch.cat([fitted.train(blocks) for blocks in at.sizes.joined()])
    torch.testing.assert_close(got, want[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(fitted.apply(others), want[1, :5], rtol=1e-9, atol=1e-11)


def test_the_dual_form_of_layers_is_what_the_memory_budget_must_hold():
    phi = features(20, 3_000)
    bound = Gram(0.1, blocks="layer").bind(source(phi).sizes)
    bound.check(2 * 8 * 20 * 20)
    with pytest.raises(UndeError, match=r"1 layers \(up to 20 × 20\) need"):
        bound.check(8 * 20 * 20)


@pytest.mark.parametrize(("n", "d"), [(30, 8), (8, 30)])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_relative_damping_is_a_multiple_of_the_mean_diagonal(n, d, form):
    """The diagonal of ΦᵀΦ, D long, also where the dual form never makes it."""
    phi = features(n, d)
    lam = 0.3 * float((phi.T @ phi).diagonal().mean())
    torch.testing.assert_close(applied(Gram(0.3, form=form), phi), explicit(phi, lam), rtol=1e-9, atol=1e-12)


def test_relative_damping_knows_no_units_and_none_is_the_pseudo_inverse():
    phi = features(30, 8)
    torch.testing.assert_close(applied(Gram(0.1), 1000 * phi), applied(Gram(0.1), phi) / 1000)
    for form in ("primal", "auto"):
        got = applied(Gram(0.0, form=form), phi)
        torch.testing.assert_close(got, torch.linalg.pinv(phi).T, rtol=1e-8, atol=1e-10)
    wide = features(8, 30)
    torch.testing.assert_close(applied(Gram(0.0), wide), torch.linalg.pinv(wide).T, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("sizes", [[24], [1] * 24, [23, 1], [7, 7, 7, 3], [5, 19]])
@pytest.mark.parametrize("joined", [1, 4 * 10 * 8, 2**26])
def test_cuts_do_not_matter(form, sizes, joined, monkeypatch):
    monkeypatch.setattr(base_module, "JOINED", joined)
    phi = features(24, 10)
    got = applied(Gram(0.5, form=form), phi, sizes)
    lam = 0.5 * float((phi.T @ phi).diagonal().mean())
    torch.testing.assert_close(got, explicit(phi, lam), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_rows_that_it_was_not_fitted_to(form):
    phi, others = features(24, 10), features(5, 10, seed=1)
    at = source(phi, [7, 17])
    bound = Gram(0.5, relative=False, form=form).bind(at.sizes)
    got = bound.fit(compute_moments(bound, at), at).apply(others)
    inverse = torch.linalg.inv(phi.T @ phi + 0.5 * torch.eye(10, dtype=torch.float64))
    torch.testing.assert_close(got, others @ inverse, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_another_damping_needs_no_other_moments(form):
    phi = features(24, 10)
    at = source(phi, [7, 17])
    one, two = (Gram(x, relative=False, form=form).bind(at.sizes) for x in (0.5, 3.0))
    assert one.key == two.key
    moments = compute_moments(one, at)
    for bound, lam in ((one, 0.5), (two, 3.0), (one, 0.5)):  # fitting leaves them as they are
        got = torch.cat([bound.fit(moments, at).train([s]) for s in range(2)])
        torch.testing.assert_close(got, explicit(phi, lam), rtol=1e-9, atol=1e-12)


def test_the_order_of_additions_depends_on_the_number_of_jobs_alone(monkeypatch):
    """Partial results may be made in any order, by anyone."""
    monkeypatch.setattr(base_module, "JOINED", 1)
    phi = features(24, 10, dtype=torch.float32)
    at = source(phi, [1] * 24)
    bound = Gram(0.5, form="primal").bind(at.sizes)
    [round_] = bound.rounds
    made = {i: round_.job(at, i, {}) for i in reversed(range(round_.jobs))}
    whole = base_module.add_partials([lambda i=i: made[i] for i in range(round_.jobs)])
    assert round_.jobs == 16
    assert torch.equal(whole["gram"], compute_moments(bound, at)["gram"])


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


def test_form_and_precision_are_known_beforehand():
    assert isinstance(Gram(0.1).bind(source(features(30, 8)).sizes), Primal)
    assert isinstance(Gram(0.1).bind(source(features(8, 30)).sizes), Dual)

    def key(n, d, **options):
        return Gram(**{"damping": 0.1, **options}).bind(source(torch.empty(n, d)).sizes).key

    assert key(300, 200) == "primal float32"
    assert key(200, 300) == "dual float32"
    assert key(300, 100) == "primal float64"  # small: it costs nothing
    assert key(300, 200, damping=1e-3) == "primal float64"
    assert key(300, 200, relative=False) == "primal float64"


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
    phi = features(20, 6)
    phi[:, 3] = 0
    with pytest.raises(UndeError, match="singular"):
        applied(Gram(0.0), phi)
    assert torch.equal(applied(Gram(0.1), phi)[:, 3], torch.zeros(20, dtype=torch.float64))


@pytest.mark.parametrize(
    ("form", "n", "d", "said"),
    [
        ("primal", 20, 1000, r"D × D kernel \(1,000 × 1,000\) needs 16 MB.*budget is 10 MB"),
        ("dual", 1000, 20, r"N × N kernel \(1,000 × 1,000\) needs 16 MB"),
    ],
)
def test_the_memory_budget(form, n, d, said):
    phi = torch.ones(n, d)
    with pytest.raises(UndeError, match=said):
        applied(Gram(0.1, form=form), phi, memory=10**7)
    applied(Gram(0.1), phi, memory=10**7)  # the other form is small


def test_the_memory_that_is_used():
    """No more than two matrices of float64 and one of float32 at any time. In bytes that torch asks for."""
    d, phi = 300, features(400, 300, dtype=torch.float32)
    with torch.profiler.profile(profile_memory=True) as profile:
        applied(Gram(0.1, form="primal"), phi)
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 8 * d * d < most < 2.6 * 8 * d * d + 4 * phi.numel()
