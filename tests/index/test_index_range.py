"""Losses of any size: scores that do not depend on it do not change, those that leave float32 are refused."""

import pytest
import torch

import toy
from unde import UndeError, methods
from unde.tasks import Classification

QUERIES = toy.data(4, seed=3)
DAMPED = {
    "primal in float32": (methods.TRAK(projection="none", form="primal"), 300),
    "dual in float32": (methods.TRAK(projection="none", form="dual"), 300),
    "primal": (methods.TRAK(projection="none", form="primal"), 22),
    "by layer": (methods.LoGRA(projection="none"), 22),
    "ekfac": (methods.EKFAC(projection="none"), 22),
}
PLAIN = {"tracin": methods.TracIn(projection="none"), "cosine": methods.TracIn("none", cosine=True)}
ASKED = {
    "total": lambda i: i.score(QUERIES).total(),
    "weighted": lambda i: i.score(QUERIES).total([0.5, 1.5]),
    "by_group": lambda i: i.score(QUERIES).by_group(),
    "top": lambda i: i.score(QUERIES).top(3).values,
    "self_influence": lambda i: i.self_influence(),
    "normalized": lambda i: i.self_influence(normalize_top=3),
}


class Scaled(Classification):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def loss(self, model, batch):
        return super().loss(model, batch) * self.factor


def build(folder, method, factor, examples=22):
    cut = {"pass_size": 64} if examples > 22 else {}
    return toy.build(folder / str(factor), examples, method=method, task=Scaled(factor), **cut)


@pytest.fixture(scope="module", params=DAMPED)
def damped(request, tmp_path_factory):
    method, examples = DAMPED[request.param]
    folder = tmp_path_factory.mktemp("i")
    one = build(folder, method, 1.0, examples)
    return method, examples, folder, {name: ask(one) for name, ask in ASKED.items()}


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**40, 1e-18, 1e18, 1e-25, 1e25])
def test_damped_scores_do_not_depend_on_the_unit_of_the_loss(damped, factor, monkeypatch):
    method, examples, folder, want = damped
    monkeypatch.setattr("unde.kernels.trak.SMALL", 16)  # as if kernels were large: float32
    index = build(folder, method, factor, examples)
    if method.name == "ekfac" and not 1e-20 < factor < 1e20:  # covariances are stored in float32
        with pytest.raises(UndeError, match=r"too (small|large) to square.*loss"):
            index.score(QUERIES)
        return
    for name, ask in ASKED.items():
        tolerance = {"rtol": 2e-5, "atol": 2e-5 * float(want[name].abs().max())}
        torch.testing.assert_close(ask(index), want[name], **tolerance)


@pytest.mark.parametrize(("factor", "way_out"), [(1e-25, "below .*: multiply"), (1e25, "beyond .*: divide")])
@pytest.mark.parametrize("name", PLAIN)
def test_scores_out_of_range_are_refused(tmp_path, name, factor, way_out):
    index = build(tmp_path, PLAIN[name], factor)
    for ask in ASKED.values():
        with pytest.raises(UndeError, match=f"scores of .* are {way_out} the loss by a constant"):
            ask(index)


def test_zero_is_a_score(tmp_path):
    """A query without a gradient has no influence, and an example that is skipped neither."""

    class Masked(Classification):
        def loss(self, model, batch):
            return super().loss(model, batch) * (batch[0][:, 0] < 0)

    x, y = toy.data(22)
    x[:, 0] = -1.0
    x[8:16, 0] = 1.0  # the whole of the second shard
    index = toy.build(tmp_path / "i", train_data=(x, y), task=Masked())
    q, labels = toy.data(4, seed=3)
    q[:, 0] = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    scores = index.score((q, labels))
    assert (scores.total() != 0).any(1).tolist() == [True, False, True, False]
    assert (scores.by_group() != 0).any(2).any(1).tolist() == [True, False, True, False]
    assert torch.equal(scores.top(3).values[1], torch.zeros(3))
    assert (index.self_influence() != 0).tolist() == [True] * 8 + [False] * 8 + [True] * 6
    assert torch.equal(index.self_influence(subset=[8, 9]), torch.zeros(2))


@pytest.mark.parametrize(("size", "said"), [(2.0**-140, "below"), (2.0**127, "beyond")])
def test_one_query_out_of_range_is_named(tmp_path, size, said):
    index = build(tmp_path, PLAIN["tracin"], 16.0)
    made = index.features(QUERIES)
    made.features[:, 2] = size * made.features[:, 2].sign()
    with pytest.raises(UndeError, match=f"scores of query 2 are {said}"):
        index.score(made).top(2)
