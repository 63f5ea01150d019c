"""Features stored in less than float32: a kernel that would make scores of their rounding is refused."""

import re

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from unde import Index, UndeError, methods
from unde.tasks import Classification

DAMPINGS = (0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-9, 0.0)
KINDS = {
    "primal": methods.TRAK(projection="kron(8)", form="primal"),
    "dual": methods.TRAK(projection="none", form="dual"),
    "by layer": methods.LoGRA(projection="kron(8)"),
    "ekfac": methods.EKFAC(projection="kron(8)"),
}


def trained(examples):
    """A model that has learned something, its data and other data."""
    g = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(5, 20, generator=g)
    y = torch.randint(5, (examples + 20,), generator=g)
    x = centres[y] + torch.randn(examples + 20, 20, generator=g)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:examples]), y[:examples]).backward()
        optimizer.step()
    return model, (x[:examples], y[:examples]), (x[examples:], y[examples:])


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    """Indexes of the same features, and queries."""
    method = KINDS[request.param]
    model, (x, y), queries = trained(600)
    if request.param == "dual":  # many dimensions: only examples that are nearly alike are dependent there
        twins = x[:60] + 1e-4 * torch.randn(60, 20, generator=torch.Generator().manual_seed(1))
        x, y = torch.cat([x[:60], twins]), y[:60].repeat(2)
    built = {}
    for dtype in ("float32", "float16", "int8"):
        folder = tmp_path_factory.mktemp(dtype) / "i"
        options = {"method": method, "store_dtype": dtype, "progress": False}
        built[dtype] = Index.build(model, Classification(), (x, y), folder, **options)
    return method, built, built["float32"].features(queries).features


def scores(index, method, features):
    made = index._state.scorer.scores(method, features, [""] * features.shape[1])
    return made.total().double()


def agreement(index, method, features, true) -> float:
    """The mean rank correlation with the scores `true`."""
    found = scores(index, method, features)
    return float(np.mean([spearmanr(a, b).statistic for a, b in zip(found, true)]))


def with_damping(method, damping):
    return type(method)(**vars(method) | {"damping": damping})


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_what_is_not_refused_can_be_relied_on(case, dtype):
    """At every damping scores are those of float32, or refused; and refused only where they are not."""
    method, built, features = case
    refused, agreements = {}, {}
    for damping in DAMPINGS:
        asked = with_damping(method, damping)
        try:
            true = scores(built["float32"], asked, features)
        except UndeError:  # singular, whatever the precision
            true = None
        try:
            agreements[damping] = agreement(built[dtype], asked, features, true)
        except UndeError as e:
            refused[damping] = str(e)
    assert agreements[0.1] > 0.995  # the default
    assert dtype == "int8" or agreements[1e-2] > 0.99
    assert min(agreements.values()) > 0.96
    assert max(refused) < (2e-2 if dtype == "int8" else 2e-3)
    assert {0.0, 1e-9} <= set(refused)
    for damping, said in refused.items():
        assert damping == 0 or re.search(r"at least [\d.e-]+, or build with store_dtype='float32'", said)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_the_damping_that_is_named_will_do(case, dtype, relative):
    method, built, features = case
    asked = type(method)(**vars(method) | {"damping": 1e-9 if relative else 1e-30, "relative": relative})
    for _ in range(20):  # an absolute one is named for the first layer that lacks it
        try:
            scores(built[dtype], asked, features)
            break
        except UndeError as e:
            said = re.search(r"raise the damping to at least ([\d.e-]+),", str(e))
            if said is None:  # singular, whatever the precision
                asked = type(method)(**vars(asked) | {"damping": 100 * asked.damping})
                continue
            assert float(said[1]) > asked.damping
            asked = type(method)(**vars(asked) | {"damping": float(said[1])})
    true = scores(built["float32"], asked, features)
    assert agreement(built[dtype], asked, features, true) > 0.96
