"""Self-influence: the diagonal of the full score matrix, weighted, normalised, of some examples."""

import pytest
import torch

import toy
from unde import UndeError, Weights
from unde.methods import TRAK, TracIn

METHODS = [
    TracIn(projection="none"),
    TracIn(projection="none", cosine=True),
    TRAK(projection="none"),
    TRAK(projection="none", damping=2.0, relative=False),
]


@pytest.fixture(scope="module", params=["one checkpoint", "three checkpoints"])
def index(tmp_path_factory, request):
    several = {"checkpoints": toy.states(1, 2, 3), "checkpoint_weights": [1, 0.5, 0.2]}
    return toy.build(
        tmp_path_factory.mktemp("index") / "i", **(several if request.param == "three checkpoints" else {})
    )


def full(index, method, weights=None):
    """(N, N): the training examples scored as queries."""
    return index.score(toy.data(22), method=method).total(weights)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(
    "weights", [None, [0.2, 1.8], Weights(torch.tensor([3.0, 1.0]), ["2", "0"])], ids=str
)
def test_it_is_the_diagonal(index, method, weights):
    want = full(index, method, weights).diagonal()
    got = index.self_influence(weights, method=method)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-8)
    if method.linear:
        assert got.std() > 0.1 * got.mean()  # examples differ, so this says something


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("m", [1, 4, 22])
def test_normalised(index, method, m):
    """τ(i, i) over the sum of the m largest τ(i, n)."""
    scores = full(index, method, [0.2, 1.8])
    total = scores.sort(descending=True).values[:, :m].sum(1)
    got = index.self_influence([0.2, 1.8], normalize_top=m, method=method)
    implied = scores.diagonal() / got  # the sum it was divided by; large terms may cancel in it
    error = (implied - total).abs() / scores.abs().sum(1)
    assert (error[total > 0] < 1e-5).all()
    assert torch.equal(got == 0, total <= 0)


def test_sums_that_are_not_positive_are_guarded(tmp_path):
    """Over all examples a sum of inner products may be negative or zero: those get 0, not nonsense."""
    index = toy.build(tmp_path / "i")
    scores = full(index, TracIn(projection="none"))
    negative = scores.sum(1) < 0
    assert 0 < int(negative.sum()) < 22
    got = index.self_influence(normalize_top=22)
    assert torch.equal(got == 0, negative)
    assert (got[~negative] > 0).all()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_subset_in_any_order(index, method):
    which = [21, 0, 13, 13, 7]
    for options in ({}, {"normalize_top": 3}):
        every = index.self_influence(method=method, **options)
        some = index.self_influence(method=method, subset=which, **options)
        torch.testing.assert_close(some, every[which], rtol=1e-6, atol=1e-9)
    assert torch.equal(index.self_influence(subset=torch.tensor(which)), index.self_influence(subset=which))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_within_a_tiny_budget(index, method, monkeypatch):
    """Three examples at a time: the same numbers."""
    want = index.self_influence([0.2, 1.8], normalize_top=5, method=method)
    per_example = 16 * 57 * len(index.manifest.models)
    toy.training(index, method)  # the kernel itself needs more
    monkeypatch.setattr(toy.stored(index), "memory", 3 * per_example)
    got = index.self_influence([0.2, 1.8], normalize_top=5, method=method)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("subset", [[], [22], [-1], [[1, 2]], [0.5], torch.ones(22, dtype=torch.bool)])
def test_subsets_that_name_nothing(tmp_path, subset):
    index = toy.build(tmp_path / "i")
    with pytest.raises(UndeError, match="subset must list examples by position, from 0 to 21"):
        index.self_influence(subset=subset)
    with pytest.raises(UndeError, match=r"top\(23\) of 22"):  # more than there are
        index.self_influence(normalize_top=23)
