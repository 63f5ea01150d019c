"""`memory=` is kept while weights are learned and many queries are asked, as the meter sees it."""

import gc

import pytest
import torch
from torch import nn

import toy
from unde import Index, learn_weights, methods
from unde.gradients.meter import Meter
from unde.tasks import Classification

EXAMPLES, MB = 2048, 1_000_000
TRACIN = methods.TracIn(projection="kron(16)")
LOGRA = methods.LoGRA(projection="kron(8)")


def data(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 40, generator=g), torch.randint(10, (n,), generator=g)


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    """Shards of 128 examples, about 0.4 MB each."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 10))
    made = {}
    for method in (TRACIN, LOGRA):
        with toy.cut(64, 2):
            folder = tmp_path_factory.mktemp(method.name) / "i"
            options = {"method": method, "groups": "tensor", "progress": False}
            made[method.name] = Index.build(model, Classification(), data(EXAMPLES), folder, **options)
    return made


def peak(index, memory, queries, use):
    """Most bytes at once, those of the queries' features included; what was fitted before is left out."""
    features = index.features(data(queries, seed=1))
    toy.training(index, index.method)
    small = toy.reopen(index, memory=memory)
    small._state.scorer._features = dict(index._state.scorer._features)
    for features_of_kernel in small._state.scorer._features.values():
        features_of_kernel._blocks_in_memory = None
    gc.collect()
    meter = Meter()
    meter.hold([features.features])
    with meter:
        result = use(small.score(features))
    return meter.peak, result


@pytest.mark.parametrize("solver", ["adamw", "fixed-point"])
@pytest.mark.parametrize(("memory", "queries"), [(5 * MB, 24), (2 * MB, 24), (2 * MB, 60)])
def test_learning_stays_within_the_budget(indexes, solver, queries, memory):
    """Contributions of a fifth of the budget, up to one and a half times as much."""

    def learn(scores):
        return learn_weights(scores, k=5, weight_decay=1.0, solver=solver, epochs=2)

    taken, learned = peak(indexes["tracin"], memory, queries, learn)
    assert taken <= 1.1 * memory
    if queries == 24:
        whole = learn(indexes["tracin"].score(data(queries, seed=1)))  # of 2 GB
        torch.testing.assert_close(learned.values, whole.values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["tracin", "logra"])
@pytest.mark.parametrize("weighted", [False, True])
def test_many_queries_stay_within_the_budget(indexes, name, weighted):
    index, queries = indexes[name], 1500
    weights = torch.linspace(0.5, 1.5, len(index.groups)) if weighted else None
    width = 4 * index.manifest.width * queries
    memory = 2 * width + 3 * MB
    taken, top = peak(index, memory, queries, lambda s: s.top(5, weights))
    assert taken <= 1.1 * memory
    whole = index.score(data(queries, seed=1)).top(5, weights)
    torch.testing.assert_close(top.values, whole.values, rtol=1e-4, atol=1e-5)
    taken, total = peak(index, memory, queries, lambda s: s.total(weights))
    assert taken - total.nbytes <= 1.1 * memory  # the scores themselves come on top


def test_features_of_many_queries_are_there_once(indexes):
    index, queries = indexes["tracin"], 1500
    with Meter() as meter:
        made = index.features(data(queries, seed=1))
    assert meter.peak <= 1.25 * made.features.nbytes
