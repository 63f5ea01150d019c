"""What is said before scores are read: gradients of zero, models that fitted nothing, lists that are all alike."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
import toy
import unde
from unde import Index
from unde.methods import TRAK, TracIn
from unde.scoring import diagnostics, documents
from unde.tasks import Classification, Task


class Hinge(Task):
    """No loss, and no gradient, where the margin is met."""

    def loss(self, model, batch):
        x, y = batch
        return (1 - (2.0 * y - 1) * model(x)[:, 0]).relu()


def hinge_index(folder, n=22, met=5):
    """The first of the examples are far on their side of the margin."""
    x, _ = toy.data(n)
    y = (x[:, 0] > 0).long()
    x[:met, 0] = 50 * (2.0 * y[:met] - 1)
    model = nn.Linear(toy.FEATURES, 1)
    with torch.no_grad():
        model.weight.copy_(torch.eye(1, toy.FEATURES))
        model.bias.zero_()
    return toy.build(folder, model=model, task=Hinge(), train_data=(x, y), method=TracIn(projection="none"))


def fitted(seed=0, steps=300):
    """A model and data that it has learned."""
    x, y = toy.data(60, seed)
    y = x[:, :3].argmax(1)
    model = toy.net()
    train(model, lambda: F.cross_entropy(model(x), y), steps)
    return model, (x, y)


def train(model, loss, steps):
    """Gradient descent; torch.optim takes seconds to import."""
    parameters = list(model.parameters())
    for _ in range(steps):
        for p, g in zip(parameters, torch.autograd.grad(loss(), parameters)):
            p.data.sub_(g, alpha=1.0)


def test_zero_gradients_of_examples_and_of_all_pieces_of_a_query_are_said(tmp_path):
    index = hinge_index(tmp_path / "i")
    zero = (index.manifest.examples,)
    x, y = toy.data(3, seed=1)
    x[1, 0], y[1] = 50, 1
    x[[0, 2], 0] = 0.01
    y[:] = 1
    scores = index.score((x, y))
    assert not scores.total()[1].any() and scores.total()[0].any()
    met = int((index._state.stored.squares.sum(1) == 0).sum())
    assert 5 <= met < zero[0]
    first, second = index.diagnose(scores)
    assert first.startswith(f"{met} of 22 training examples have a gradient of zero: their scores are 0")
    assert second.startswith("1 of 3 queries has a gradient of zero (query 1): all its scores are 0.")
    assert "neither proponents nor opponents" in second
    assert index.diagnose() == [first]
    x, y = toy.data(4, seed=1)
    x[:, 0], y[:] = torch.tensor([50.0, 50.0, 50.0, 0.01]), 1
    found = index.diagnose(index.score((x, y)), queries=documents(["a:1", "a:2", "b:1", "b:2"]))[1]
    assert found.startswith("1 of 2 queries has a gradient of zero (query a)")


def test_a_model_that_fitted_is_not_told_of(tmp_path):
    """One fitted checkpoint is enough, and losses of the user are not judged."""

    class Scaled(Classification):
        def loss(self, model, batch):
            return 9 * super().loss(model, batch)

    model, data = fitted()
    states = [*toy.states(1), model.state_dict()]
    trak = TRAK(projection="none")
    for i, options in enumerate(({"method": trak}, {"checkpoints": states}, {"task": Scaled()})):
        assert toy.build(tmp_path / str(i), model=model, train_data=data, **options).diagnose() == []
    hinge = toy.build(tmp_path / "hinge", task=Hinge(), train_data=data, model=nn.Linear(5, 1))
    assert hinge.diagnose() is not None


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_model_that_fitted_nothing_is_told_of(tmp_path, checkpoints):
    _, data = fitted(steps=0)
    states = toy.states(1, 2) if checkpoints else None
    index = toy.build(tmp_path / "i", train_data=data, checkpoints=states)
    loss = min(float(toy.stored(index).values("loss", c).mean()) for c in range(1 + checkpoints))
    assert loss > 2 / 3 * math.log(3)
    [said] = index.diagnose()
    assert f"the mean training loss is {loss:.2f}, a uniform guess among 3 outcomes has 1.10" in said


def test_without_a_model_nothing_is_said_of_it(tmp_path):
    index = toy.build(tmp_path / "i")
    assert index.diagnose() != []
    assert Index.open(index.folder).diagnose() == []


def test_language_models(tmp_path):
    torch.manual_seed(0)
    ids = torch.arange(5).repeat(12, 1) % 7 + torch.randint(2, (12, 1))
    data, model = [{"input_ids": row, "labels": row} for row in ids], models.Tokens(width=8)
    for reduction in ("mean", "sum"):
        task = unde.tasks.CausalLM(reduction=reduction)
        said = toy.build(tmp_path / reduction, model=model, task=task, train_data=data).diagnose()
        assert ["among 7 outcomes has 1.95" in s for s in said] == [True] * (reduction == "mean")
    batch = {"input_ids": ids, "labels": ids}
    train(model, lambda: unde.tasks.CausalLM().loss(model, batch).mean(), 200)
    task = unde.tasks.CausalLM()
    assert toy.build(tmp_path / "fitted", model=model, task=task, train_data=data).diagnose() == []


def outlier(folder, queries):
    """One training example with a gradient that is a hundred times as large as those of others."""
    torch.manual_seed(0)
    x, w = torch.randn(120, 5), torch.ones(5)
    x[:, 0] = 3
    x[77] *= 30
    model = nn.Linear(5, 1)
    index = toy.build(
        folder, model=model, task=unde.tasks.Regression(), train_data=(x, x @ w), method=TracIn(projection="none"),
        ids=[f"row-{i}" for i in range(120)],
    )  # fmt: skip
    q = torch.randn(queries, 5)
    q[:, 0] = 3
    return index, (q, q @ w)


def test_lists_that_hardly_depend_on_the_query(tmp_path):
    index, queries = outlier(tmp_path / "i", 6)
    scores = index.score(queries)
    top = scores.top(10).indices
    counts = {i: sum(i in row for row in top.tolist()) for i in set(top.flatten().tolist())}
    assert counts[77] > 3
    [said] = index.diagnose(scores)
    shared = [len(set(a) & set(b)) for i, a in enumerate(top.tolist()) for b in top.tolist()[:i]]
    assert "row-77" in said and f"two lists share {sum(shared) / len(shared):.1f} of 10 on average" in said
    assert index.diagnose(index.score(tuple(c[:3] for c in queries))) == []  # too few to tell
    assert index.diagnose(scores, top=scores.top(3))[0].startswith("The top 3 hardly depend on the query")


def test_lists_of_different_queries_are_not_told_of(tmp_path):
    model, data = fitted(steps=60)
    index = toy.build(tmp_path / "i", model=model, train_data=data, method=TRAK(projection="none"))
    x, _ = toy.data(12, seed=5)
    assert index.diagnose(index.score((x, x[:, :3].argmax(1)))) == []


def test_zero_gradient_queries():
    features = torch.randn(2, 5, 7)
    features[:, 3] = 0
    features[0, 1] = 0  # under one checkpoint alone
    assert diagnostics.zero_gradient_queries(features) == [3]


@pytest.mark.parametrize(
    ("loss", "outcomes", "told"),
    [
        (math.log(10), 10, True),
        (1.6, 10, True),
        (1.4, 10, False),  # half of 10 classes right
        (math.log(2), 2, True),
        (0.6, 2, False),  # labels may be as noisy
        (10.7, 50_257, True),
        (4.0, 50_257, False),
        (5.0, 1, False),
        (float("nan"), 10, False),
    ],
)
def test_unfitted(loss, outcomes, told):
    assert diagnostics.unfitted(loss, outcomes) == told


def test_hubs_against_counting():
    torch.manual_seed(0)
    for queries in (3, 4, 5, 9, 40):
        top = torch.stack([torch.randperm(30)[:3] for _ in range(queries)])
        top[: queries * 2 // 3 + 1, 0] = 99
        counts = {i: sum(i in row for row in top.tolist()) for i in range(100)}
        want = [(i, c) for i, c in counts.items() if c > queries / 2 and c > 3 and queries > 3]
        assert diagnostics.hub_examples(top, 1000) == sorted(want, key=lambda p: (-p[1], p[0]))
    assert diagnostics.hub_examples(top, 29) == []  # three of 29 are in many lists by chance
