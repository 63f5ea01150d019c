"""Whole models: features equal explicit per-example gradients; every parameter goes the expected way."""

import pytest
import torch

from cases import BY_NAME, CASES
from oracles import TOLERANCE, assert_features, collect, explicit, plan, slow_gradients, ways

EVERY = [
    pytest.param(case, dtype, id=f"{case}-{label}")
    for case in CASES
    for dtype, label in [(torch.float32, "fp32"), (torch.float64, "fp64")]
]


@pytest.mark.parametrize(("case", "dtype"), EVERY)
def test_equal_to_a_loop_of_backward_passes(case, dtype):
    model, task, rows = case.make(dtype, examples=7)
    truth = slow_gradients(model, task, rows)
    units, coverage = plan(model, task, rows)
    features = collect(model, task, rows, units, coverage, batch_size=5)  # a whole batch and a short one
    assert features.dtype == dtype
    assert_features(features, truth, units, TOLERANCE[dtype])


@pytest.mark.parametrize(("case", "dtype"), EVERY)
def test_ways(case, dtype):
    model, task, rows = case.make(dtype)
    units, coverage = plan(model, task, rows)
    found = ways(units, coverage)
    assert list(found) == [n for n, p in model.named_parameters() if p.requires_grad]
    for name, way in found.items():
        assert way in case.expected(name), f"{name}: {way}, expected {case.expected(name)}"


@pytest.mark.parametrize("projection", ["kron(3)", "sjlt(7)", "dense(7, normal)"])
@pytest.mark.parametrize("name", [c.name for c in CASES if c.name not in ("gru", "resnet-groupnorm")])
def test_projected(name, projection):
    model, task, rows = BY_NAME[name].make(torch.float64, examples=4)
    units, coverage = plan(model, task, rows, projection, seed=3)
    features = collect(model, task, rows, units, coverage, batch_size=4)
    truth = slow_gradients(model, task, rows)
    projected = {u.name: explicit(u.projection, truth[u.name]) for u in units}
    assert max(u.stop - u.start for u in units) <= 9
    tolerance = 1e-10
    assert_features(features, projected, units, tolerance)
