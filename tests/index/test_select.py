"""`unde.select`: scores against autograd, strategies, near duplicates, budgets and refusals."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

import toy
import unde
from refusals import refused
from unde.index.select import parse_budget
from unde.methods import TracIn

N = 40
RATES = [0.3, 0.1]
TARGETS = {"one": toy.data(4, seed=5), "two": toy.data(3, seed=6)}


def gradient(model, x, y):
    """The flat gradient of one example."""
    grads = torch.autograd.grad(cross_entropy(model(x[None]), y[None]), list(model.parameters()))
    return torch.cat([g.flatten() for g in grads])


def moments():
    g = torch.Generator().manual_seed(1)
    return {name: torch.rand(p.shape, generator=g) + 0.01 for name, p in toy.net().named_parameters()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An index of two checkpoints with second moments."""
    folder = tmp_path_factory.mktemp("select")
    return toy.build(
        folder / "i", N, method=TracIn(projection="none"), checkpoints=toy.states(0, 1),
        checkpoint_weights=RATES, second_moments=moments(),
    )  # fmt: skip


def by_hand(targets, v):
    """LESS: Adam's step on the training side, the plain mean gradient of the target on the other."""
    x, y = toy.data(N)
    metric = torch.cat([m.flatten() for m in v.values()]).sqrt() if v else torch.tensor(1.0)
    out = torch.zeros(len(targets), N)
    for state, rate in zip(toy.states(0, 1), RATES):
        model = toy.net()
        model.load_state_dict(state)
        train = torch.stack([gradient(model, *row) for row in zip(x, y)]) / metric
        mean = torch.stack(
            [torch.stack([gradient(model, *row) for row in zip(*t)]).mean(0) for t in targets.values()]
        )
        out += rate / sum(RATES) * torch.cosine_similarity(mean[:, None], train[None], dim=2)
    return out


def test_scores_are_those_of_less(built):
    torch.testing.assert_close(
        unde.select(built, TARGETS, 5).scores, by_hand(TARGETS, moments()), rtol=1e-3, atol=1e-4
    )


def test_projected_gradients_are_compared_in_the_metric_of_the_index(tmp_path):
    index = toy.build(tmp_path / "i", N, method=TracIn(projection="sjlt(20)"), second_moments=moments())
    q, train = index.features(TARGETS["one"]).mean().features[0], index._state.stored.rows(torch.arange(N))
    want = torch.cosine_similarity(q, train[0], dim=1)
    torch.testing.assert_close(
        unde.select(index, {"one": TARGETS["one"]}, 5).scores[0], want, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("strategy", ["max", "mean", "round-robin"])
def test_strategies(built, strategy):
    chosen = unde.select(built, TARGETS, 6, strategy, duplicates=None)
    scores = chosen.scores
    if strategy == "round-robin":
        want: list[int] = []
        for turn in range(6):
            want.append(next(i for i in scores[turn % 2].argsort(descending=True).tolist() if i not in want))
        assert chosen.chosen_for == ["one", "two"] * 3
    else:
        values = scores.amax(0) if strategy == "max" else scores.mean(0)
        want = values.topk(6).indices.tolist()
    assert chosen.indices.tolist() == want
    assert chosen.table["index"].tolist() == want and set(chosen.table.columns) >= {"score one", "target"}


def test_a_method_of_the_index_scores_instead(built):
    chosen = unde.select(built, TARGETS, 6, "mean", method="tracin", duplicates=None)
    scores = built.score(built.features(TARGETS["two"]).mean(), "tracin").total()[0]
    torch.testing.assert_close(chosen.scores[1], scores)


@pytest.mark.parametrize("width", [None, 3])  # as it is, and sketched
def test_near_duplicates_are_passed_over(tmp_path, monkeypatch, width):
    if width is not None:
        monkeypatch.setattr("unde.index.select.SKETCH", 16)
    x, y = toy.data(N)
    x, y = x[torch.arange(N) // 2], y[torch.arange(N) // 2]  # each twice
    index = unde.Index.build(
        toy.net(), unde.tasks.Classification(), (x, y), tmp_path / "i", method="tracin", progress=False
    )
    pair = {"one": TARGETS["one"]}
    assert len({i // 2 for i in unde.select(index, pair, 10, duplicates=None).indices.tolist()}) == 5
    chosen = unde.select(index, pair, 10, duplicates=0.9999)
    assert len({i // 2 for i in chosen.indices.tolist()}) == 10 and chosen.duplicates >= 9
    assert "near duplicates passed over" in repr(chosen)
    assert len(unde.select(index, pair, 30, duplicates=0.9999)) == 20


def test_budgets_and_refusals(built):
    select = partial(unde.select, built)
    assert len(select(TARGETS, "10%")) == 4 and parse_budget(1.0, 7) == 7
    for wrong in (0, -1, 41, 1.5, "many", "0", True, float("nan")):
        refused("budget", select, TARGETS, wrong)
    refused("holds 40", select, TARGETS, 41)
    refused("unknown strategy 'best'", select, TARGETS, 5, "best")
    refused("targets is empty", select, {}, 5)
    refused("targets is a tuple", select, TARGETS["one"], 5)
    refused("target 'one' has no queries", select, {"one": []}, 5)
    refused("a cosine", select, TARGETS, 5, duplicates=1.5)
    refused("select chooses from an index, and got a list", unde.select, [1, 2], TARGETS, 5)


def test_an_index_without_checkpoints_says_so(tmp_path, capsys):
    index = toy.build(tmp_path / "i", N)
    assert len(unde.select(index, TARGETS, 5)) == 5
    text = " ".join(capsys.readouterr().err.split())
    assert "one set of weights" in text and "no second moments" in text
