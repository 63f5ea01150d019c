"""Training, weight learning and evaluation share no example, in Python as on the command line."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import toy
from unde import UndeError, Weights, evaluate, learn_weights, methods

TRAIN, LEARN, OTHERS = toy.data(22), toy.data(6, seed=3), toy.data(5, seed=4)
MASKS = np.random.default_rng(0).random((12, 22)) < 0.5
ASKED = {"k": 2, "weight_decay": 1.0}  # as asked for: nothing is judged


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return toy.build(tmp_path_factory.mktemp("roles") / "i", train_data=TRAIN, method=methods.TRAK())


@pytest.fixture(scope="module")
def weights(index):
    return learn_weights(index.score(LEARN), **ASKED)


def joined(one, other, count=2):
    """All of one, and the first few of another."""
    return tuple(torch.cat([a, b[:count]]) for a, b in zip(one, other))


def utility(scores):
    return np.random.default_rng(1).normal(size=(12, len(scores)))


@pytest.mark.parametrize("learn", [learn_weights, lambda s, **o: learn_weights({"a": s}, **o)])
def test_weights_are_not_learned_from_training_examples(index, learn):
    scores = index.score(joined(LEARN, TRAIN, 3))
    assert scores.trained_on() == [6, 7, 8]
    with pytest.raises(UndeError, match=r"3 of the queries are also in the training data: .*disjoint"):
        learn(scores, **ASKED)
    learn(index.score(LEARN), **ASKED)


@pytest.mark.parametrize("opened", [True, False])
def test_weights_are_not_used_on_queries_that_they_came_from(index, weights, opened):
    at = toy.reopen(index) if opened else index
    scores = at.score(joined(OTHERS, LEARN))
    saying = pytest.raises(
        UndeError, match=r"were learned on 2 of these 7 queries, at positions 5, 6: .*values"
    )
    for use in (scores.total, lambda w: scores.top(2, w), scores.regroup(index.groups).total):
        with saying:
            use(weights)
    torch.testing.assert_close(scores.total(weights.values)[:5], index.score(OTHERS).total(weights))


def test_a_file_of_weights_remembers(index, weights, tmp_path):
    weights.save(tmp_path / "w.json")
    with pytest.raises(UndeError, match="learned on 6 of these 6 queries"):
        index.score(LEARN).total(Weights.load(tmp_path / "w.json"))


def test_evaluation_has_queries_of_its_own(index, weights):
    for queries, said in (
        (TRAIN, "5 of the queries are also in the training"),
        (LEARN, "learned on 5 of these"),
    ):
        scores = index.score(tuple(x[:5] for x in queries))
        with pytest.raises(UndeError, match=said):
            evaluate.compare(scores, weights, MASKS, utility(scores), bootstrap=0)
        with pytest.raises(UndeError, match=said):
            evaluate.fine_grained(scores, {"w": weights}, {"a": MASKS[:5]}, k=2)
    scores = index.score(OTHERS)
    assert evaluate.compare(scores, weights, MASKS, utility(scores), bootstrap=0).checked


def test_single_groups_are_measured_on_other_queries(index):
    scores = index.score(tuple(x[:5] for x in TRAIN))
    for measure in (
        lambda: evaluate.lds_strength(scores, MASKS, utility(scores), cells=lambda name: (name, "all")),
        lambda: evaluate.recall_strength(scores, {"a": MASKS[:5]}, k=2, cells=lambda name: (name, "all")),
    ):
        with pytest.raises(UndeError, match="5 of the queries are also in the training data"):
            measure()


def test_asking_is_free(index, weights):
    """About training examples, weighted and not; themselves with weights that come from training examples."""
    scores = index.score(TRAIN)
    assert scores.top(1).indices.shape == (22, 1)
    total = scores.total(weights)
    assert torch.equal(total, scores.total(weights.values))
    own = replace(weights, query_digests=scores.query_digests)
    torch.testing.assert_close(index.self_influence(own), total.diagonal(), rtol=1e-4, atol=1e-6)
    with pytest.raises(UndeError, match="learned on 22 of these 22"):
        scores.total(own)
